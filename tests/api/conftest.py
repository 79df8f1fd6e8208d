"""A tiny run and an objective of a user's for the tests of the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest

import longtake
from tests.train.conftest import clips  # noqa: F401 - a fixture
from tests.train.runs import write_config


@pytest.fixture
def run(tmp_path: Path, clips: Path) -> longtake.Run:  # noqa: F811 - the fixture
    """A tiny run that writes below `tmp_path / "outputs"`."""
    return longtake.Run.load(write_config(tmp_path, clips))
