"""Law 1: one process = 2 = 4 processes, sharded or in replicas, also where the ranks do not divide the slots of a step.

Each number of processes is launched once and plays all its layouts through `train`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.parallel.world import start_world
from longtake.track.progress import make_console
from longtake.train.optimizer.sharded import ShardedAdamW
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.forks import on_processes
from tests.precision import within
from tests.train.runs import free_port, metrics, write_config

# 14 micro-batches: at G = 4 the last of 4 steps has two slots, for which 4 ranks are too many; at G = 3 the last of 5.
BUCKETS = {"32px": {1: (1.0, 4), 8: (1.0, 5), 16: (1.0, 2)}}
# eps keeps Adam from blowing rounding errors up: at 1e-8 an update hardly depends on the size of a tiny gradient.
SETTINGS = {"bucket_config": BUCKETS, "max_steps": 5, "eps": 1e-4}
LAYOUTS = {  # name -> (number of processes, overrides); the first two are what the others are compared with
    "G4 on 1": (1, ("--slots-per-step", "4")),
    "G3 on 1": (1, ("--slots-per-step", "3")),
    "bad clip on 1": (1, ("--dataset.data-path", "{bad}")),
    "G4 on 2": (2, ("--slots-per-step", "4")),
    "G3 on 2": (2, ("--slots-per-step", "3")),
    "G4 on 2 replicas": (2, ("--slots-per-step", "4", "--parallel.replicate", "2")),
    "G4 on 2 by blocks zero 2": (2, ("--slots-per-step", "4", "--parallel.zero", "2")),
    "bad clip on 2": (2, ("--dataset.data-path", "{bad}")),
    "G4 on 4": (4, ("--slots-per-step", "4")),
    "G4 on 2 x 2 by blocks": (4, ("--slots-per-step", "4", "--parallel.replicate", "2", "--parallel.shard", "2")),
}
PAIRS = [(name, f"{name[:2]} on 1") for name, (ranks, _) in LAYOUTS.items() if ranks > 1 and name.startswith("G")]
BAD = "clips/clip_00003.mp4"


@dataclass(frozen=True)
class Played:
    """What a layout did."""

    folder: Path
    lines: list[dict[str, Any]]
    gradients: dict[str, Tensor]  # of step 1, whole


def _play_as_one_of_many(rank: int, size: int, port: int, folder: Path, bad: Path) -> None:
    """What torchrun would set up for one process, then `_play`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    _play(rank, size, folder, bad)


def _play(rank: int, size: int, folder: Path, bad: Path) -> None:
    """One process of `size`: every layout of that many, one after the other."""
    step = ShardedAdamW.step
    gradients: dict[str, Tensor] = {}

    def watched(self: ShardedAdamW, *args: Any) -> None:
        if not gradients:
            for name, p in self.parameters.items():
                gradients[name] = p.grad.full_tensor().clone()  # one rank's own part is whole: no copy
        step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedAdamW, "step", watched)
        _play_layouts(rank, size, folder, bad, gradients, patch)


def _play_layouts(
    rank: int, size: int, folder: Path, bad: Path, gradients: dict[str, Tensor], patch: pytest.MonkeyPatch
) -> None:
    with start_world("cpu", timeout_seconds=120) as world, (folder / "said.txt").open("a") as said:
        for name, (ranks, overrides) in LAYOUTS.items():
            if ranks != size:
                continue
            gradients.clear()
            patch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0 if "by blocks" in name else 4_000_000)
            flags = [word.format(bad=bad) for word in overrides]
            config = read_run(str(folder / "tiny.py"), ["--exp-name", name.replace(" ", "_"), *flags]).value
            outcome = train(config, world, str(folder / "tiny.py"), make_console(said))
            if rank == 0:
                torch.save((outcome.folder, gradients), folder / f"{name}.pt")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> dict[str, Played]:
    folder = tmp_path_factory.mktemp("worlds")
    copies = shutil.copytree(clips.parent, folder / "clips")
    (copies / BAD).write_bytes(b"")
    write_config(folder, clips, **SETTINGS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _play(0, 1, folder, copies / clips.name)
    torch.set_num_threads(threads)
    for size in (2, 4):
        on_processes(_play_as_one_of_many, size, size, free_port(), folder, copies / clips.name)
    found = {}
    for name in LAYOUTS:
        run, gradients = torch.load(folder / f"{name}.pt", weights_only=False)
        found[name] = Played(run, metrics(run), gradients)
    return found


@pytest.mark.parametrize(("many", "one"), PAIRS, ids=lambda name: name)
def test_every_world_trains_on_the_same_samples_in_the_same_order(
    played: dict[str, Played], many: str, one: str
) -> None:
    ours, theirs = played[many].lines, played[one].lines
    assert [line["digest"] for line in ours] == [line["digest"] for line in theirs]
    assert [line["buckets"].keys() for line in ours] == [line["buckets"].keys() for line in theirs]
    assert len(ours) == 5


@pytest.mark.parametrize(("many", "one"), PAIRS, ids=lambda name: name)
def test_every_world_has_the_same_losses(played: dict[str, Played], many: str, one: str) -> None:
    for ours, theirs in zip(played[many].lines, played[one].lines, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["buckets"] == pytest.approx(theirs["buckets"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("many", "one"), PAIRS, ids=lambda name: name)
def test_every_world_has_the_same_gradients(played: dict[str, Played], many: str, one: str) -> None:
    ours, theirs = played[many].gradients, played[one].gradients
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    farthest = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert largest > 0
    assert within(farthest, 1e-5 * largest)


def test_the_logged_norm_is_that_of_the_whole_gradient(played: dict[str, Played]) -> None:
    for run in played.values():
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in run.gradients.values()))
        assert run.lines[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_initial_weights_are_the_same_in_every_world(played: dict[str, Played]) -> None:
    """Step 1 sees nothing but them: its losses of single buckets differ by rounding alone."""
    first = [run.lines[0]["buckets"] for name, run in played.items() if name.startswith("G4")]
    assert all(buckets == pytest.approx(first[0], rel=1e-6) for buckets in first)


def test_a_bad_clip_costs_the_same_on_any_number_of_processes(played: dict[str, Played]) -> None:
    one, two = played["bad clip on 1"], played["bad clip on 2"]
    for run in (one, two):
        lines = (run.folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
        assert [(json.loads(line)["path"], json.loads(line)["pass_index"]) for line in lines] == [(BAD, 0)]
    assert [line["digest"] for line in one.lines] == [line["digest"] for line in two.lines]
    assert [line["loss"] for line in one.lines] == pytest.approx([line["loss"] for line in two.lines], rel=1e-5)


def test_many_processes_report_and_save_as_one(played: dict[str, Played]) -> None:
    for run in played.values():
        assert [path.name.split("-")[1] for path in run.folder.glob("epoch*")] == ["global_step5"]
        assert [line["step"] for line in run.lines] == [1, 2, 3, 4, 5]
