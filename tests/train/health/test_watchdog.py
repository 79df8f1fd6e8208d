"""A run that hangs says where every rank stands and ends with its own code."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from longtake.train.health import watchdog
from longtake.train.health.launches import read_launches
from longtake.train.health.watchdog import EXIT_HANG, Watchdog, collective_timeout
from tests.train.runs import PATIENCE_SECONDS, finish, start

HANGS = """
import os, sys, time
from longtake.cli import main
from longtake.train import loop
from longtake.train.health import watchdog

forward_backward = loop.Trainer.forward_backward
leave_at_once = watchdog.leave_at_once


def hangs_in_the_third(self, *args):
    if self.clock.global_step == 2 and os.environ.get("RANK", "0") == os.environ["HANGING_RANK"]:
        time.sleep(600)
    return forward_backward(self, *args)


def leaves_last(code):  # torchrun says no codes where it signals a rank that has ended by itself meanwhile
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ["RANK"] == os.environ["HANGING_RANK"]:
        time.sleep(5)
    leave_at_once(code)


loop.Trainer.forward_backward = hangs_in_the_third
watchdog.leave_at_once = leaves_last
main(sys.argv[1:])
"""


def reports(config: Path) -> dict[str, str]:
    folders = list((config.parent / "outputs" / "tiny").glob("hang-*"))
    assert len(folders) == 1
    return {path.name: path.read_text(encoding="utf-8") for path in folders[0].glob("rank-*.txt")}


class Clock:
    """Stands for `time` in the watchdog: the test says how late it is, and counts the looks at it."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0

    def monotonic(self) -> float:
        self.looks += threading.current_thread().name == "watchdog"
        return self.now

    def wait_for_a_look(self) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        seen = self.looks
        while self.looks == seen:
            assert time.monotonic() < end, "nobody watches"
            time.sleep(0.005)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled where a watchdog would have ended this process."""
    ended: list[bool] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, late: ended.append(late))
    return ended


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_a_watchdog_that_is_fed_says_nothing(tmp_path: Path, clock: Clock, ended: list[bool]) -> None:
    watchdog = Watchdog(0.2, tmp_path / "hang", rank=0, world_size=1)
    for step in range(8):
        clock.now += 0.15
        watchdog.beat(step)
        clock.wait_for_a_look()
    watchdog.close()
    for thread in watchers():
        thread.join(PATIENCE_SECONDS)
    assert watchers() == []
    assert ended == []


def test_a_watchdog_that_is_not_fed_ends_the_process(tmp_path: Path, clock: Clock, ended: list[bool]) -> None:
    watchdog = Watchdog(0.2, tmp_path / "hang", rank=0, world_size=1)
    watchdog.beat(1)
    clock.now += 0.25
    clock.wait_for_a_look()
    watchdog.close()
    for thread in watchers():
        thread.join(PATIENCE_SECONDS)
    assert True in ended


def test_without_seconds_there_is_no_watchdog(tmp_path: Path) -> None:
    watchdog = Watchdog(None, tmp_path / "hang", rank=0, world_size=1)
    watchdog.beat(1)
    assert watchers() == []


@pytest.mark.parametrize(("first", "hang"), [(1800.0, 1800.0), (60.0, 7200.0), (600.0, 30.0), (600.0, None)])
def test_a_collective_waits_for_longer_than_the_watchdog(first: float, hang: float | None) -> None:
    assert collective_timeout(first, hang) >= max(first, hang or 0.0) + 60.0


def test_a_run_that_hangs_ends_with_its_stacks(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGING_RANK", "0")
    code, _, error = finish(start("train", config, "--watchdog-seconds", "6", program=("-c", HANGS)))
    assert code == EXIT_HANG, error
    assert "watchdog_seconds = 6: no step was finished in this many seconds after step" in error
    assert "hangs_in_the_third" in reports(config)["rank-00000.txt"]
    assert [one.ended for one in read_launches(config.parent / "outputs" / "tiny")] == ["hung"]


@pytest.mark.slow
def test_one_rank_that_hangs_brings_the_stacks_of_all(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGING_RANK", "1")
    program = config.parent / "hangs.py"
    program.write_text(HANGS, encoding="utf-8")
    command = ("train", config, "--watchdog-seconds", "10")
    code, _, error = finish(start(*command, processes=2, program=(str(program),)))
    assert code == 1  # torchrun's own
    assert f"exitcode  : {EXIT_HANG}" in error
    found = reports(config)
    assert found.keys() == {"rank-00000.txt", "rank-00001.txt"}
    assert "hangs_in_the_third" in found["rank-00001.txt"]
    assert "loop.py" in found["rank-00000.txt"]  # in whichever collective it waits
    folder = next((config.parent / "outputs" / "tiny").glob("hang-*"))
    for rank in (0, 1):
        entries = json.loads((folder / f"flight-0000{rank}.json").read_text())["entries"]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)
    assert not list(folder.glob(".*.partial*"))
