"""The clips and the config of the training tests, and a command line in this process."""

from __future__ import annotations

from tests.cli.conftest import longtake, mistake
from tests.train.conftest import clips, config

__all__ = ["clips", "config", "longtake", "mistake"]
