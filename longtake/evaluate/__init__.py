"""Measures of what a model makes: here the judge of the demo's made-up shapes, which looks at pixels alone."""

from __future__ import annotations

from longtake.evaluate.shapes_judge import Accuracy, Judgement, is_right, judge, score

__all__ = ["Accuracy", "Judgement", "is_right", "judge", "score"]
