"""Where the seconds of a run went, over its launches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.train.health.goodput import FILE, Seconds, Stopwatch
from longtake.train.loop import Trainer
from longtake.train.saving import Saver
from tests.train.runs import metrics, state_of, train_here


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("longtake.train.health.goodput.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("longtake.train.health.goodput.time.time", lambda: now[0])
    return now


def test_every_second_has_its_place(tmp_path: Path, clock: list[float]) -> None:
    watch = Stopwatch(tmp_path, {}, launched=90.0, restarted=False, enabled=True)
    watch.step(wait_seconds=3.0)  # the first step: all of it is the start
    clock[0] = 110.0
    watch.step(wait_seconds=2.0)
    with watch.saving():
        clock[0] = 114.0
    clock[0] = 119.0
    watch.step(wait_seconds=0.0)
    clock[0] = 120.0
    watch.step(wait_seconds=0.0, counts=False)
    assert watch.seconds == Seconds(steps=13.0, start=10.0, save=4.0, wait=2.0, skipped=1.0)
    assert watch.seconds.goodput == pytest.approx(13 / 30)


def test_what_a_dead_launch_made_after_its_checkpoint_was_made_again(tmp_path: Path, clock: list[float]) -> None:
    first = Stopwatch(tmp_path, {}, launched=100.0, restarted=False, enabled=True)
    first.step(0.0)
    clock[0] = 110.0
    first.step(0.0)
    kept = {"steps": 10.0}
    clock[0] = 114.0
    first.step(0.0)
    first.write()
    clock[0] = 130.0
    second = Stopwatch(tmp_path, kept, launched=125.0, restarted=True, enabled=True)
    second.step(0.0)
    assert second.seconds == Seconds(steps=10.0, again=4.0, start=16.0)


def test_a_pause_between_launches_by_hand_is_not_lost(tmp_path: Path, clock: list[float]) -> None:
    Stopwatch(tmp_path, {}, launched=100.0, restarted=False, enabled=True).write()
    clock[0] = 9000.0
    second = Stopwatch(tmp_path, {}, launched=8995.0, restarted=False, enabled=True)
    second.step(0.0)
    assert second.seconds.start == 5.0


def test_a_damaged_file_costs_the_count_only(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{", encoding="utf-8")
    assert Stopwatch(tmp_path, {"steps": 3.0}, time.time(), False, enabled=True).seconds == Seconds(steps=3.0)


def test_a_run_keeps_its_seconds_in_its_folder_and_its_checkpoints(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on in steps and saves alone."""
    now = [100.0]
    monkeypatch.setattr("longtake.train.health.goodput.time.perf_counter", lambda: now[0])

    def lasting(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            now[0] += seconds
            return call(*args, **options)

        return called

    monkeypatch.setattr(Trainer, "forward_backward", lasting(1.0, Trainer.forward_backward))
    monkeypatch.setattr(Saver, "save", lasting(0.25, Saver.save))
    monkeypatch.setattr("longtake.train.run._LEAST_SECONDS", 6.5)
    outcome, said = train_here(config, "--ckpt-every", "4", "--max-steps", "8")
    kept = json.loads((outcome.folder / FILE).read_text())
    assert 0 < kept["goodput"] < 1
    assert kept["start"] > 0
    assert (kept["steps"], kept["save"], kept["wait"]) == (6.0, 0.75, 0.0)  # three calls: the last finds its step saved
    assert "(goodput)" not in said  # of a try
    assert state_of(outcome.checkpoint)["seconds"]["steps"] == 6.0
    lines = metrics(outcome.folder)[2:]  # the second step ends as the first is read: it counts as start
    assert sum(line["seconds"] for line in lines) == 6.25  # the other saves come after the last step
    resumed, said = train_here(outcome.folder, "--max-steps", "12")
    assert "(goodput)" in said
    kept = json.loads((resumed.folder / FILE).read_text())
    assert (kept["steps"], kept["again"]) == (8.0, 0.0)  # two of its four steps make its start
