"""A launch on 24 nodes, to which things happen: `make cluster`. Each has a network and processes of its own, in
namespaces of this machine.

Four nodes train. The others run a stand-in for torchrun, without torch: 24 ranks would take a machine's memory. They
cannot be in torch's world then (`--torchrun "--nnodes 4"`), and hold on to its rendezvous instead; for the launch they
are hosts like the first four.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from longtake.processes import RESTARTS
from tests.cluster.namespaces import cut_power, ip, light_python, missing, network, send
from tests.cluster.servers import ALONE, SSHD, Site, site, start_launch, words_of
from tests.train.runs import kill, metrics, write_config

NAMES = [f"node{number}" for number in range(1, 25)]
REAL = NAMES[:4]
AHEAD = 7.0  # seconds of a node's clock
PATIENCE_SECONDS = 900  # nothing waits so long where cores are free
PYTHON = "python-of-node"  # start-up files of a shell may put others before what is on PATH
LAUNCH = ("--name", "tiny", "--python", PYTHON, "--torchrun", "--nnodes 4", "--env", "GLOO_SOCKET_IFNAME=eth0")

# `longtake`, whose steps take a second from some step on.
SLOW = """
import os, sys, time
from longtake.cli import main
from longtake.train import loop

forward_backward = loop.Trainer.forward_backward


def slow(self, *args):
    if self.clock.global_step >= {step} and os.environ.get("{restarts}", "0") in {starts}:
        time.sleep(1)
    return forward_backward(self, *args)


loop.Trainer.forward_backward = slow
main(sys.argv[1:])
"""
CLOCK = f"import time\nreal = time.time\ntime.time = lambda: real() + {AHEAD}\n"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None or SSHD is None, reason=missing() or "no SSH server here"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """24 SSH servers; node9's clock is ahead for Python."""
    folder = tmp_path_factory.mktemp("nodes")
    light = light_python(folder)
    (folder / "ahead").mkdir()
    (folder / "ahead" / "sitecustomize.py").write_text(CLOCK)
    with (
        network(NAMES) as addresses,
        site(folder, addresses, lambda name: ["ip", "netns", "exec", name, *ALONE]) as place,
    ):
        for name in NAMES:
            python = sys.executable if name in REAL else light
            clock = f"PYTHONPATH={folder / 'ahead'} " if name == "node9" else ""
            place.tool(name, PYTHON, f'#!/bin/sh\n{clock}exec {python} "$@"\n')
        yield place


class Rehearsal:
    """A launch that is under way, and what it has said."""

    def __init__(self, place: Site, folder: Path, clips: Path, slow: str, options: tuple[object, ...], **changes: Any):
        config = write_config(folder, clips, slots_per_step=4, ckpt_every=5, **changes)
        (folder / "slow.py").write_text(slow)
        self.place, self.run, self.log = place, folder / "outputs" / "tiny", folder / "launch.log"
        words = ("slow.py", "train", config)
        self.process = start_launch(place, *words, folder=folder, options=(*LAUNCH, *options), log=self.log)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def last_step(self) -> int:
        return max((line["step"] for line in metrics(self.run)), default=0)

    def until(self, ready: Callable[[], object]) -> float:
        """Waits; returns the seconds that it took."""
        begin = time.monotonic()
        while not ready():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < begin + PATIENCE_SECONDS, self.said()
            time.sleep(0.1)
        return time.monotonic() - begin

    def goes_on(self) -> None:
        before = self.last_step()
        self.until(lambda: self.last_step() > before)

    def ended(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def look(self, away: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """What `longtake nodes` knows, by node, once all but those that are away answer."""
        words = ["nodes", self.place.hostfile, "--json", "--ssh", self.place.ssh, "--python", PYTHON]
        told: dict[str, dict[str, Any]] = {}

        def expected() -> bool:
            told.update({one["node"]: one for one in json.loads(longtake(*words))})
            return {name for name, one in told.items() if "fault" in one} == set(away)

        self.until(expected)
        return told


def longtake(*words: object) -> str:
    command = [sys.executable, "-m", "longtake", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS).stdout


def process_of(name: str, rank: int) -> int:
    """The process of a rank, on its node."""
    for pid in map(int, ip("netns", "pids", name).split()):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables and b"slow.py" in words_of(pid):
            return pid
    raise AssertionError(f"rank {rank} does not run")


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process gets an eighth of its time, in parts shorter than a forward: ranks on shared cores differ by half."""
    over = threading.Event()

    def slow() -> None:
        while not over.wait(0.002):
            os.kill(pid, SIGSTOP)
            time.sleep(0.014)
            os.kill(pid, SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def steps(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "loss" in line]


def test_a_slow_node_a_clock_and_a_frozen_rank(nodes: Site, tmp_path: Path, clips: Path, found: dict[str, Any]):
    slow = SLOW.format(step=70, restarts=RESTARTS, starts=("0",))
    begin = time.monotonic()
    launch = Rehearsal(nodes, tmp_path, clips, slow, ("--restarts", 1), max_steps=100, watchdog_seconds=60.0)
    try:
        launch.until(lambda: launch.last_step() >= 4)
        started = time.monotonic() - begin
        assert "tiny starts on 24 hosts: node1, node2," in launch.said()
        with slowed(process_of("node3", 2)):
            asked = time.monotonic()
            told = launch.look()
            took = time.monotonic() - asked
            launch.until(lambda: launch.last_step() >= 62)
            scores = re.findall(
                r'relative_score\{.*rank="(\d+)".*\} ([\d.]+)', longtake("health", launch.run, "--once")
            )
        assert [[run["name"] for run in one["runs"]] for one in told.values()] == [["tiny"]] * 24
        offsets = {name: one["clock_offset_seconds"] for name, one in told.items()}
        ahead = dict.fromkeys(offsets, 0.0) | {"node9": AHEAD}
        assert all(abs(offset - ahead[name]) <= took for name, offset in offsets.items())
        assert scores[0][0] == "2", scores
        os.kill(process_of("node2", 1), SIGSTOP)
        named = launch.until(lambda: "diagnosis: " in launch.said())
        assert launch.ended() == 0, launch.said()
        assert "starts again (1 of 1)\n" in launch.said()
        assert steps(metrics(launch.run)) == list(range(1, 101))
    finally:
        kill(launch.process)
    (diagnosis,) = re.findall(r"diagnosis: (.*)", launch.said())
    assert diagnosis.startswith("NCCL time-out, on node")
    found["24 nodes, undisturbed"] = {"first_steps_after_seconds": round(started), "runs_shown_on_nodes": 24}
    found["24 nodes, a clock ahead"] = {
        "ahead_seconds": AHEAD,
        "shown_seconds": round(offsets["node9"], 3),
        "others_shown_within_seconds": round(max(abs(o) for n, o in offsets.items() if n != "node9"), 3),
    }
    found["24 nodes, a rank with an eighth of its time"] = {
        "first_in_health": f"rank {scores[0][0]}",
        "relative_scores": {f"rank {rank}": float(score) for rank, score in scores},
    }
    found["24 nodes, a rank frozen"] = {
        "watchdog_seconds": 60,
        "named_after_seconds": round(named),
        "diagnosis": diagnosis,
        "then": "started again on 24 nodes, all steps once",
    }


def test_nodes_without_power_and_a_frozen_one(nodes: Site, tmp_path: Path, clips: Path, found: dict[str, Any]):
    slow = SLOW.format(step=10, restarts=RESTARTS, starts=("0", "1", "2"))
    launch = Rehearsal(nodes, tmp_path, clips, slow, ("--restarts", 2), max_steps=1000)
    figures: dict[str, Any] = {}
    try:
        launch.until(lambda: launch.last_step() >= 12)
        for number, (name, fault) in enumerate(
            (("node20", cut_power), ("node13", lambda name: send(name, SIGSTOP))), 1
        ):
            fault(name)
            named = launch.until(lambda number=number: launch.said().count("diagnosis: ") == number)
            assert f"diagnosis: a node is away, on {name} (the connection was lost)" in launch.said()
            again = launch.until(lambda number=number: f"starts again ({number} of 2)" in launch.said())
            assert f"starts again ({number} of 2), without {name}\n" in launch.said()
            again += launch.until(lambda number=number: launch.said().count("tiny starts on ") == number + 1)
            launch.goes_on()
            figures[name] = {"named_after_seconds": round(named), "starts_on_the_others_after_seconds": round(again)}
        told = launch.look(away={"node13", "node20"})
        cut_power("node4")
        named = launch.until(lambda: launch.said().count("diagnosis: ") == 3)
        assert launch.ended() == 1
        assert "diagnosis: a node is away, on node4 (the connection was lost)" in launch.said()
        assert launch.said().count("starts again") == 2
        last = launch.last_step()
        assert steps(metrics(launch.run)) == list(range(1, last + 1))
    finally:
        kill(launch.process)
        send("node13", SIGCONT)
    found["24 nodes, one without power"] = figures["node20"]
    found["23 nodes, one frozen"] = {**figures["node13"], "shown_as": told["node13"]["fault"]}
    found["22 nodes, one of a rank without power"] = {
        "named_after_seconds": round(named),
        "then": "ended with 1: both restarts were used",
    }
