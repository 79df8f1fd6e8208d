"""A run over shards trains what a run over the table does, bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longtake.data.tables.convert import make_shards
from tests.train.runs import exact, train_here, write_config


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_shards_and_the_table_give_the_same_losses(tmp_path: Path, clips: Path, workers: int) -> None:
    shutil.copytree(clips.parent, tmp_path / "set")
    table = tmp_path / "set" / clips.name
    words = ("--num_workers", str(workers), "--max_steps", "4")
    plain, _ = train_here(write_config(tmp_path / "a", table), *words)
    shards = make_shards(table, tmp_path / "clips.shards").folder
    mapped, said = train_here(write_config(tmp_path / "b", shards), *words)
    assert "40 of 40 clips used" in said
    cached, _ = train_here(write_config(tmp_path / "c", table), *words, "--dataset.memory_efficient", "True")
    assert exact(plain.folder) == exact(mapped.folder) == exact(cached.folder)
    assert len(list(table.parent.glob(".*.shards"))) == 1


def test_a_folder_of_clips_trains(tmp_path: Path, clips: Path) -> None:
    shutil.copytree(clips.parent / "clips", tmp_path / "set")
    _, said = train_here(write_config(tmp_path / "run", tmp_path / "set"), "--max_steps", "1")
    assert "40 of 40 clips used" in said
