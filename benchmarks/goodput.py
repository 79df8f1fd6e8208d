"""Thirty days of a cluster that fails: which share of the time goes into steps that count.

python benchmarks/goodput.py                      24 and 128 nodes of 8 GPUs, the 11B model's second stage
python benchmarks/goodput.py --nodes 128 --interruptions 0.02
python benchmarks/goodput.py --tiny               half a day of 24 nodes that fail often, to see that it runs

Times are simulated, what decides is Longtake's own: `plan` says the time of a step, of a save and of a restart and
chooses the interval; checkpoints are real folders, written, kept and swept as in a run, and found again by
`last_whole`; the cause of each failure is read by `diagnose` from what the hosts said, and `next_launch` says whether a
new start helps and on which hosts; seconds are counted by the run's own stopwatch.

Failures come at exponential times, of the kinds and in the numbers of Llama 3 405B's 54 days on 16,384 GPUs
(arXiv:2407.21783, table 5). Where no new start helps, or after three of one launch, somebody launches again after half
an hour, on all nodes that are there: a lost one is repaired after a day. A node that is away costs its share of the
time of all: `share_of_all_nodes` counts it, `goodput` is the run's own figure.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time as clock
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import print_table, write_json

from longtake.checkpoint.runs import last_whole, list_checkpoints, retain
from longtake.checkpoint.save import open_partial, save_checkpoint
from longtake.cluster.arguments import Host
from longtake.cluster.diagnosis import HostEnd, diagnose
from longtake.cluster.launch import Launch
from longtake.cluster.restarts import next_launch
from longtake.parallel.world import World
from longtake.plan.failures import Failures, forecast_failures
from longtake.plan.machine import Machine
from longtake.plan.run import plan_run
from longtake.presets import find_preset
from longtake.track.devices import gpu_named
from longtake.train.config import RunWithoutTable
from longtake.train.health import goodput
from longtake.train.run_file import read_run

TARGET = 0.95  # at 1,024 GPUs
RUN = "opensora_v2/stage2"
KEPT = 3  # keep_n_latest
RESTARTS = 3  # of one launch, as `longtake launch` has it
HUMAN_SECONDS, REPAIR_SECONDS = 1800.0, 86400.0
WATCHDOG_SECONDS = 1800.0  # the default: so long nobody notices a run that hangs
LOST = "longtake: rank 0: the connection to another process of the run is lost, which ended first"
ERROR = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']
# What a node says at its end, its exit code (None: silence), how many of 419, seconds until the launch notices.
KINDS: dict[str, tuple[str, int | None, int, float]] = {
    "GPU": ("torch.AcceleratorError: CUDA error: unspecified launch failure", 1, 148 + 17, 0.0),
    "memory of a GPU": ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, 72 + 19, 0.0),
    "software": ("KeyError: 'fps'", 1, 54, 0.0),
    "switch, cable, adapter": ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError", 1, 35 + 7, 0.0),
    "maintenance, power, heat": ("", None, 32 + 3 + 6, 0.0),
    "a collective that hangs": ("Watchdog caught collective operation timeout", 76, 7, WATCHDOG_SECONDS),
    "a damaged checkpoint": ("", None, 6 + 3, 0.0),  # silent corruption, disks: the newest one is not whole
    "others": ("", 1, 10, 0.0),
}


@dataclass
class Clock:
    """Takes the place of `time` in the stopwatch."""

    now: float = 0.0

    def time(self) -> float:
        return self.now

    perf_counter = time


@dataclass
class Play:
    """A run of so many nodes, from its first launch on."""

    folder: Path
    nodes: int
    costs: Failures
    step_seconds: float
    every: int  # steps between checkpoints
    rng: np.random.Generator
    clock: Clock = field(default_factory=Clock)
    step: int = 0
    useful: float = 0.0  # node-seconds of steps that count
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    away: list[float] = field(default_factory=list)  # when lost nodes come back

    def run(self, days: float) -> dict[str, Any]:
        """Plays so many days; the figures."""
        goodput.time = self.clock  # type: ignore[attr-defined]
        end, launch, humans, noticed = days * 86400.0, self._launch(), 0, 0.0
        while self.clock.now < end:
            kind, began = self._until_failure(len(launch.hosts), end, restarted=bool(launch.environment), since=noticed)
            if kind is None:
                break
            noticed = began
            found = diagnose(self._ends(kind, launch))
            self.clock.now += KINDS[kind][3]
            for _ in found.without:
                heapq.heappush(self.away, self.clock.now + REPAIR_SECONDS)
            following = next_launch(launch, found, RESTARTS)
            if following is None:
                humans, self.clock.now = humans + 1, self.clock.now + HUMAN_SECONDS
                following = self._launch()
            launch = following
        seconds = goodput.read_seconds(self.folder)
        total = end * self.nodes
        return {
            "nodes": self.nodes,
            "gpus": 8 * self.nodes,
            "days": days,
            "ckpt_every": self.every,
            "failures": self.failures,
            "launched_by_hand": humans,
            "forecast": self.costs.goodput(self.every * self.step_seconds),
            "goodput": seconds.goodput,
            "share_of_all_nodes": self.useful / total,
            "seconds": asdict(seconds),
            "checkpoints_left": len(list_checkpoints(self.folder)),
        }

    def _launch(self) -> Launch:
        """On all nodes that are there; by somebody."""
        while self.away and self.away[0] <= self.clock.now:
            heapq.heappop(self.away)
        hosts = [Host(f"node{number}") for number in range(self.nodes - len(self.away))]
        return Launch(hosts=hosts, words=["train", RUN], name="run", folder=str(self.folder), workdir=".", job="1")

    def _until_failure(self, nodes: int, end: float, restarted: bool, since: float) -> tuple[str | None, float]:
        """Goes on from the last whole checkpoint until something fails: what, and when."""
        failure = self.clock.now + self.rng.exponential(self.costs.between * self.nodes / nodes)
        launched = self.clock.now
        self.clock.now += self.costs.restart
        whole = last_whole(self.folder, World.here())
        saved = {} if whole is None else goodput.parse_json((whole / "run.json").read_text())
        self.step, kept = saved.get("step", 0), saved.get("seconds", {})
        watch = goodput.Stopwatch(self.folder, kept, since if restarted else launched, restarted, enabled=True)
        counted, beginning, step = self.useful, self.step, self.step_seconds * self.nodes / nodes
        watch.first_step()
        due: tuple[float, int, dict[str, float]] | None = None  # a checkpoint that is being written
        safe = beginning
        while self.clock.now < min(failure, end):
            self.clock.now += step
            self.step += 1
            watch.step(0.0)
            if due is not None and self.clock.now >= due[0]:
                self._save(*due[1:])
                safe, due = due[1], None
            if self.step % self.every == 0 and due is None:
                with watch.saving():
                    self.clock.now += self.costs.stall
                due = self.clock.now + self.costs.write, self.step, asdict(watch.seconds)
        watch.write()
        cut = self.clock.now < end or failure < end
        last = safe if cut else self.step
        self.useful = counted + (last - beginning) * self.step_seconds * self.nodes
        if not cut:
            return None, self.clock.now
        kind = str(self.rng.choice(list(KINDS), p=[count / 419 for _, _, count, _ in KINDS.values()]))
        self.failures[kind] += 1
        if due is not None:
            open_partial(self._path(due[1]))  # what a cut save leaves
        if kind == "a damaged checkpoint":
            self._damage()
        return kind, self.clock.now

    def _path(self, step: int) -> Path:
        return self.folder / f"epoch0-global_step{step}"

    def _save(self, step: int, seconds: dict[str, float]) -> None:
        save_checkpoint(
            self.folder, 0, step, {"model.weight": torch.full((8,), float(step))}, {"step": step, "seconds": seconds}
        )
        retain(self.folder, KEPT)

    def _damage(self) -> None:
        """Turns a byte of the newest checkpoint around; what was done since the one before it is made again."""
        found = list_checkpoints(self.folder)
        if len(found) < 2:
            return
        shard = next(found[-1].path.glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 255
        shard.write_bytes(content)
        self.useful -= (found[-1].step - found[-2].step) * self.step_seconds * self.nodes

    def _ends(self, kind: str, launch: Launch) -> list[HostEnd]:
        said, code, _, _ = KINDS[kind]
        label = launch.hosts[int(self.rng.integers(len(launch.hosts)))].label
        lines = [*ERROR, said] if "Error" in said else [said]
        others = [HostEnd(host.label, 2, [LOST]) for host in launch.hosts if host.label != label]
        return [HostEnd(label, code, lines, first=True), *others]


def main() -> None:
    """Plays each size and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", help="default: 24 and 128")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--interruptions", type=float, default=Machine.interruptions, help="a node and day")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    runs = []
    for nodes in args.nodes or ([24] if args.tiny else [24, 128]):
        machine = replace(Machine(gpu_named("h200")), interruptions=0.5 if args.tiny else args.interruptions)
        found = plan_run(read_run(find_preset(RUN), [], RunWithoutTable).value, 8 * nodes, machine)
        costs, step = forecast_failures(found), found.forecast.step_seconds
        every, started = max(1, round(costs.interval / step)), clock.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            play = Play(Path(folder), nodes, costs, step, every, np.random.default_rng(args.seed))
            figures = play.run(0.5 if args.tiny else args.days)
        figures |= {"interruptions": machine.interruptions, "played_in_seconds": clock.perf_counter() - started}
        runs.append(figures)
    rows = []
    for run in runs:
        shares = (f"{run[key]:.2%}" for key in ("forecast", "goodput", "share_of_all_nodes"))
        counts = (run["nodes"], run["gpus"], sum(run["failures"].values()), run["launched_by_hand"], run["ckpt_every"])
        rows.append((*counts, *shares))
    head = ("nodes", "GPUs", "failures", "by hand", "ckpt_every", "forecast", "goodput", "of all nodes")
    print_table(head, rows)
    write_json(args.json, "goodput", {"run": RUN, "target": TARGET, "runs": runs})


if __name__ == "__main__":
    main()
