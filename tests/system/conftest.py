"""The tiny run of the training tests, for what a trained model becomes."""

from __future__ import annotations

from tests.train.conftest import clips, config

__all__ = ["clips", "config"]
