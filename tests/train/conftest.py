"""Clips made once a session, and a config of a tiny run over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from tests.train.runs import write_config


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probed table of 32 clips and 8 stills. Nobody changes it or its files."""
    folder = tmp_path_factory.mktemp("clips")
    made = make_shapes(folder, seed=10, num_clips=32, num_stills=8)  # of a seed by which they fill 16 micro-batches
    probe_table(made, folder / "clips.parquet")
    return folder / "clips.parquet"


@pytest.fixture
def config(tmp_path: Path, clips: Path) -> Path:
    """The config file of a tiny run that writes below `tmp_path / "outputs"`."""
    return write_config(tmp_path, clips)
