"""The clips of the tiny run, for checkpoints of real runs."""

from tests.train.conftest import clips

__all__ = ["clips"]
