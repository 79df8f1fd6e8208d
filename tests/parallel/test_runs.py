"""A run whose micro-batches are shared by peers is the run of one process, and so is what comes after it."""

from __future__ import annotations

import pytest

from tests.parallel.conftest import Worlds
from tests.parallel.one_step import Facts
from tests.parallel.runs_on_peers import STEPS


def test_peers_train_on_the_same_samples_with_the_same_losses_and_others_go_on(alone: Facts, worlds: Worlds) -> None:
    """Steps 4 and 5 are those of another mesh, which loads what the peers saved."""
    ours, theirs = worlds(4)[0]["run"]["lines"], alone["lines"]
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for line, expected in zip(ours, theirs, strict=True):
        assert (line["digest"], line["samples"]) == (expected["digest"], expected["samples"])
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["buckets"] == pytest.approx(expected["buckets"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_peers_make_the_videos_of_one_process(alone: Facts, worlds: Worlds) -> None:
    ours, theirs = worlds(4)[0]["run"]["videos"], alone["videos"]
    assert len(ours) == len(theirs) == 3
    for video, expected in zip(ours, theirs, strict=True):
        assert video == pytest.approx(expected, abs=1)
    assert theirs[0] != theirs[1]
