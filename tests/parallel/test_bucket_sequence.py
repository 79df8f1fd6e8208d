"""Runs whose buckets have sequence degrees of their own make the steps of one process (laws 1 to 3)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake.buckets.dealing import Forward, deal
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.world import World, start_world
from longtake.train import stream
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.ranks import Facts, on_ranks
from tests.train.conftest import clips
from tests.train.runs import exact, finish, kill, metrics, start, state_of, steps_saved, wait_until, write_config

__all__ = ["clips"]
SAMPLES, SLOTS = 40, 3  # of the pass, of a step
MOVED = 2  # the step whose checkpoint other meshes go on from
DEGREES = {"32px": {1: 1, 8: 2}}  # the longest at all four


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    # eps keeps Adam from blowing rounding errors up
    table = {"32px": {1: (1.0, 1), 8: (1.0, 2), 16: (1.0, 2)}}
    folder = tmp_path_factory.mktemp("run")
    changes = {"slots_per_step": SLOTS, "epochs": 1, "max_steps": None, "ckpt_every": MOVED, "async_io": False}
    return write_config(folder, clips, eps=1e-4, bucket_config=table, **changes)


def run(source: Path, world: World, parallel: Mapping[str, Any], *overrides: str) -> Path:
    """The folder of a run to the end of its pass, or as far as `overrides` say."""
    words = [word for key, value in parallel.items() for word in (f"--parallel.{key}", str(value))]
    config = read_run(str(source), [*words, *overrides]).value
    return train(config, world, str(source), Console(file=io.StringIO())).folder


def play(
    source: Path, name: str, parallel: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], world: World
) -> Facts:
    """A whole pass; the same in two parts; and on from its second step on other meshes."""
    forwards: list[Forward] = []

    def counted(*args: Any) -> list[Forward]:
        found = deal(*args)
        forwards.extend(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "deal", counted)
        whole = run(source, world, parallel, "--exp-name", name)
    first = run(source, world, parallel, "--exp-name", f"{name}-parts", "--max-steps", str(MOVED))
    run(first, world, parallel, "--max-steps", "None")
    load = ("--load", str(next(whole.glob(f"epoch*-global_step{MOVED}"))))
    moved = {other: str(run(source, world, changes, *load)) for other, changes in others.items()}
    return {"whole": str(whole), "parts": str(first), "moved": moved, "forwards": len(forwards)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> list[Facts]:
    others = {
        "pairs": {"sequence": 2, "bucket_sequence": DEGREES},
        "no peers": {"bucket_sequence": DEGREES},
        "tensor peers": {"sequence": 2, "tensor": 2, "bucket_sequence": DEGREES},
    }
    plays = {"run": partial(play, tiny_run, "four", {"sequence": 4, "bucket_sequence": DEGREES}, others)}
    return [facts["run"] for facts in on_ranks(4, tmp_path_factory.mktemp("four"), plays)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> list[Facts]:
    plays = {
        "run": partial(play, tiny_run, "two", {"sequence": 2, "bucket_sequence": "auto"}, {}),
        "measured": partial(measured, tiny_run),
    }
    found = on_ranks(2, tmp_path_factory.mktemp("two"), plays)
    return [facts["run"] | {"degrees timed": facts["measured"]} for facts in found]


def measured(source: Path, world: World) -> list[int]:
    """The degrees at which the first launch times its buckets."""
    degrees: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketPeers, "use", lambda self, degree: degrees.append(degree))
        patch.setattr("longtake.train.cost._seconds", lambda system, shape, batch_size: 1.0)
        words = ("--exp-name", "measured", "--dataset.cost", "measure", "--start-step", "99")
        run(source, world, {"sequence": 2, "bucket_sequence": {"32px": {1: 1, 8: 1}}}, *words)
    return degrees


@pytest.fixture(params=[pytest.param("four", marks=pytest.mark.slow), "two"])
def found(request: pytest.FixtureRequest) -> list[Facts]:
    return request.getfixturevalue(request.param)


def expect_same_steps(ours: Path, theirs: Path) -> None:
    """The same samples in the same steps, losses and gradients within rounding."""
    expected = {line["step"]: line for line in metrics(theirs)}
    lines = metrics(ours)
    assert [line["step"] for line in lines] == list(expected)[-len(lines) :]
    for line in lines:
        there = expected[line["step"]]
        assert (line["digest"], line["samples"]) == (there["digest"], there["samples"])
        assert line["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert line["buckets"] == pytest.approx(there["buckets"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)


def test_one_process_makes_the_steps_that_peers_began(found: list[Facts], tiny_run: Path) -> None:
    whole = Path(found[0]["whole"])
    lines = metrics(whole)
    load = ("--load", str(next(whole.glob(f"epoch*-global_step{MOVED}"))))
    written = "auto" if whole.name == "two" else DEGREES
    with start_world("cpu") as world:
        alone = run(tiny_run, world, {"bucket_sequence": written}, *load)
    assert len(metrics(alone)) == len(lines) - MOVED >= 2
    expect_same_steps(alone, whole)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pairs", "no peers", "tensor peers"])
def test_other_meshes_go_on_with_the_same_steps(four: list[Facts], mesh: str) -> None:
    expect_same_steps(Path(four[0]["moved"][mesh]), Path(four[0]["whole"]))


def test_a_pass_sees_every_sample_once_and_in_two_parts_bit_by_bit(found: list[Facts]) -> None:
    whole, parts = Path(found[0]["whole"]), Path(found[0]["parts"])
    assert sum(line["samples"] for line in metrics(whole)) == SAMPLES
    assert exact(parts) == exact(whole)


@pytest.mark.slow
def test_every_slot_is_one_forward_of_every_rank(four: list[Facts]) -> None:
    """No rank has more to do than another, and stills take a quarter of the forwards they would take one by one."""
    whole = Path(four[0]["whole"])
    (forwards,) = {facts["forwards"] for facts in four}
    steps = len(metrics(whole))
    assert SLOTS * (steps - 1) < forwards <= SLOTS * steps
    state = state_of(next(whole.glob(f"epoch*-global_step{MOVED}")))
    assert state["slot_sizes"]["sizes"] == {"32px": {"1": 4, "8": 2, "16": 1}}


def test_buckets_are_timed_at_their_own_degree(two: list[Facts]) -> None:
    """In the order of their tokens: stills and 8 frames at one rank each, 16 frames at both."""
    ours, theirs = (facts["degrees timed"] for facts in two)
    assert ours == theirs == sorted(ours)
    assert set(ours) == {1, 2}


@pytest.mark.slow
def test_degrees_change_the_steps_when_they_change_and_nothing_is_lost(four: list[Facts], tiny_run: Path) -> None:
    """Another setting is an era: larger steps end, what is left is dealt anew."""
    whole = Path(four[0]["whole"])
    load = ("--load", str(next(whole.glob(f"epoch*-global_step{MOVED}"))))
    with start_world("cpu") as world:
        changed = run(tiny_run, world, {}, *load)
    seen = sum(line["samples"] for line in metrics(whole)[:MOVED])
    assert sum(line["samples"] for line in metrics(changed)) == SAMPLES - seen
    last = max(changed.glob("epoch*-global_step*"), key=lambda path: state_of(path)["clock"]["global_step"])
    assert len(state_of(last)["data"]["eras"]) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_in_mid_pass_as_the_run_that_was_never_killed(tiny_run: Path) -> None:
    """With loader processes on both peers, each of which decodes its share."""
    words = ("--parallel.sequence", 2, "--parallel.bucket_sequence", DEGREES, "--epochs", 4, "--num-workers", 1)
    code, _, error = finish(start("train", tiny_run, *words, "--exp-name", "undisturbed", processes=2))
    assert code == 0, error
    outputs = tiny_run.parent / "outputs"
    process = start("train", tiny_run, *words, "--exp-name", "killed", processes=2)
    wait_until(process, lambda: len(metrics(outputs / "killed")) > 2 * MOVED + 1)
    kill(process)
    process.communicate()
    saved, whole = steps_saved(outputs / "killed"), exact(outputs / "undisturbed")
    assert 0 < saved[-1] < len(whole)
    again = start("train", tiny_run, *words, "--exp-name", "killed", "--resume", "auto", processes=2)
    code, out, error = finish(again)
    assert code == 0, error
    assert f"step {saved[-1]}" in out
    assert exact(outputs / "killed") == whole
