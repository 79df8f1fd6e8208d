"""Measures of what a model makes: here the judge of the demo's made-up shapes, which looks at pixels alone."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.evaluate.shapes_judge import Accuracy, Judgement, is_right, judge, score

__getattr__ = lazy_exports(__name__)
