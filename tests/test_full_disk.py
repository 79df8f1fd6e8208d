"""A full disk: whatever is written, the error says where, how much was written and what is free."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from longtake.buckets.order import plan_pass, write_order
from longtake.data.probing.journal import Journal
from longtake.data.shapes import make_shapes
from longtake.durable import write_whole
from longtake.track.config import TrackingConfig
from longtake.track.trackers import MetricsFile, TensorBoard, TrackedRun
from longtake.weights.files import save_weights
from tests.buckets.tables import inputs

LIMIT = 1000


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As if the disk were full beyond so many bytes of each file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_metrics(folder: Path, kind: type) -> None:
    tracker = kind(TrackedRun(folder, TrackingConfig()))
    for step in range(100):
        tracker.log(step, {"train/loss": 1.0})
        tracker.log_line({"step": step, "loss": 1.0})


def write_journal(folder: Path) -> None:
    with Journal(folder / "a.journal", {}) as journal:
        for row in range(1000):
            journal.add(row, [1, 2, 3])


WRITERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda folder: write_metrics(folder, MetricsFile),
    "events.out.": lambda folder: write_metrics(folder, TensorBoard),
    "a.journal": write_journal,
    "weights.safetensors": lambda folder: save_weights({"a": torch.zeros(1000)}, folder / "weights.safetensors"),
    "prompts.txt": lambda folder: make_shapes(folder, num_clips=0, num_stills=50),
    "keys.npy": lambda folder: write_order(plan_pass(inputs(), 0), folder),
    "whole": lambda folder: write_whole(folder / "whole", bytes(2000)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_told_with_its_place(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(LIMIT), pytest.raises(OSError, match=r"\d MB .*were written, .* free\); make room") as caught:
        WRITERS[name](tmp_path)
    assert name in Path(caught.value.filename).name
    assert capfd.readouterr() == ("", ""), "the sentence is said once, by the caller"
