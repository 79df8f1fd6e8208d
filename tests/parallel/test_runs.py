"""A run whose micro-batches are shared by peers is the run of one process, and so is one that changes its mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.runs import resolve
from tests.parallel.conftest import Worlds
from tests.parallel.runs_on_peers import CONTINUED_ON, STEPS
from tests.ranks import Facts
from tests.train.runs import metrics, train_here


def test_peers_train_on_the_same_samples_with_the_same_losses_and_others_go_on(alone: Facts, worlds: Worlds) -> None:
    """Steps 4 and 5 are those of another mesh, which loads what the peers saved."""
    ours, theirs = worlds(4, "run")[0]["lines"], alone["lines"]
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for line, expected in zip(ours, theirs, strict=True):
        assert (line["digest"], line["samples"]) == (expected["digest"], expected["samples"])
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["buckets"] == pytest.approx(expected["buckets"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_peers_make_the_videos_of_one_process(alone: Facts, worlds: Worlds) -> None:
    ours, theirs = worlds(4, "run")[0]["videos"], alone["videos"]
    assert len(ours) == len(theirs) == 3
    for video, expected in zip(ours, theirs, strict=True):
        assert video == pytest.approx(expected, abs=0.1)
    assert theirs[0] != theirs[1]


@pytest.fixture(scope="session")
def undisturbed(tiny_run: Path) -> Path:
    """The folder of the run that one process makes without a stop."""
    flags = ("--exp-name", "undisturbed", "--slots-per-step", "2", "--max-steps", str(STEPS + 1))
    return train_here(tiny_run, *flags)[0].folder


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, whole."""
    checkpoint = resolve(run)
    into = {row.name: torch.empty(row.shape, dtype=row.dtype) for row in inspect(checkpoint).rows}
    load_tensors(checkpoint, into)
    return into


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for meshes in CONTINUED_ON.values() for name in meshes])
def test_a_run_saved_on_one_mesh_goes_on_on_any_other(name: str, continued: dict[str, Path], undisturbed: Path) -> None:
    """The same samples and losses in the steps after the change, and the same weights, averages and moments."""
    ours, theirs = metrics(continued[name]), metrics(undisturbed)
    assert [(line["step"], line["digest"]) for line in ours] == [(line["step"], line["digest"]) for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    assert [line["grad_norm"] for line in ours] == pytest.approx([line["grad_norm"] for line in theirs], rel=1e-5)
    found, wanted = tensors_of(continued[name]), tensors_of(undisturbed)
    assert found.keys() == wanted.keys()
    for tensor, expected in wanted.items():
        torch.testing.assert_close(
            found[tensor], expected, rtol=1e-4, atol=1e-6, msg=lambda said, t=tensor: f"{t}: {said}"
        )
