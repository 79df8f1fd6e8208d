"""The loss of a step: a sample weighs the same in a full and in a short micro-batch, and padding counts nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.train.runs import metrics, train_here, write_config


@pytest.fixture
def images(tmp_path: Path, clips: Path) -> Path:
    """A table of three square images, which a test may damage."""
    table = Path(shutil.copytree(clips.parent, tmp_path / "clips")) / clips.name
    rows = pq.read_table(table)
    square = pc.and_(pc.equal(rows["num_frames"], 1), pc.equal(rows["height"], rows["width"]))
    pq.write_table(rows.filter(square).slice(0, 3), table)
    return table


def first_step(folder: Path, table: Path, batch_size: int, slots: int = 1, **changes: Any) -> dict[str, Any]:
    """The metrics of the first step of a run over `table`."""
    buckets = {"32px": {1: (1.0, batch_size)}}
    run = write_config(folder, table, bucket_config=buckets, slots_per_step=slots, max_steps=1, **changes)
    return metrics(train_here(run)[0].folder)[0]


@pytest.mark.parametrize(
    ("batch_size", "slots"),
    [(4, 1), (2, 2), (1, 3), (5, 2)],
    ids=["one filler", "a full and a short one", "three of one sample", "two fillers"],
)
def test_step_loss_is_the_mean_of_its_samples_in_any_micro_batches(
    tmp_path: Path, images: Path, batch_size: int, slots: int
) -> None:
    whole = first_step(tmp_path / "whole", images, batch_size=3)
    divided = first_step(tmp_path / "divided", images, batch_size, slots)
    assert divided["samples"] == whole["samples"] == 3
    for name in ("loss", "grad_norm"):
        assert divided[name] == pytest.approx(whole[name], rel=1e-5)
    assert list(divided["buckets"].values()) == pytest.approx([whole["loss"]], rel=1e-5)


def test_lost_sample_stays_in_the_divisor_and_leaves_the_logged_mean(tmp_path: Path, images: Path) -> None:
    rows = pq.read_table(images)
    pq.write_table(rows.slice(0, 2), images.with_name("two.parquet"))
    sound = first_step(tmp_path / "sound", images.with_name("two.parquet"), batch_size=2)
    (images.parent / rows["path"][2].as_py()).write_bytes(b"no image")
    damaged = first_step(tmp_path / "damaged", images, batch_size=3, dataset={"data_path": str(images), "max_bad": 1.0})
    assert damaged["samples"] == 2
    assert damaged["loss"] == pytest.approx(sound["loss"], rel=1e-5)
    assert damaged["grad_norm"] == pytest.approx(sound["grad_norm"] * 2 / 3, rel=1e-5)
