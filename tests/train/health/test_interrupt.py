"""The wish to stop, and the timer of the first step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from longtake.train import folder, loop, run
from longtake.train.health.interrupt import FirstStepTimer, StopRequest, held_signals, seconds_left
from tests.train.runs import PATIENCE_SECONDS, metrics, steps_saved, train_here


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_first_signal_is_a_wish(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err.count("stopping after this step with a checkpoint") == 1


def test_a_second_ctrl_c_stops_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_only_one_of_many_processes_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(announce=False) as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked
    assert capfd.readouterr().err == ""


def test_a_launch_stops_before_its_time_is_over(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of ten minutes 9 are for steps, of an hour 54; the wish then is as a signal's."""
    assert [seconds_left(minutes, 60.0) for minutes in (None, 10, 60)] == [None, 8 * 60, 53 * 60]
    outcome, _ = train_here(config, "--time-limit", "1e-6")
    assert outcome.stopped
    assert steps_saved(outcome.folder)[-1] <= 2
    assert "time_limit is near" in capfd.readouterr().err


def test_a_timer_that_is_done_says_nothing() -> None:
    timer = FirstStepTimer(2.0 * PATIENCE_SECONDS)
    timer.done()
    timer._timer.join(PATIENCE_SECONDS)
    assert not timer._timer.is_alive()  # ended before its time, so without a word, and with this process still there


@pytest.mark.parametrize(("module", "moment"), [(folder, "_find"), (run.RunLaunch, "announce")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_folder_is_taken_back_whenever_before_the_first_step_a_signal_comes(
    config: Path, monkeypatch: pytest.MonkeyPatch, module: object, moment: str, number: signal.Signals
) -> None:
    made: list[object] = []
    make = getattr(module, moment)

    def interrupted(*args: object) -> object:
        made.append(make(*args))
        os.kill(os.getpid(), number)
        return made[0]

    monkeypatch.setattr(module, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_here(config)
    assert made
    assert not (config.parent / "outputs" / "tiny").exists()


def test_a_second_signal_is_not_held() -> None:
    waited: list[int] = []

    def press_twice() -> None:
        with held_signals():
            os.kill(os.getpid(), signal.SIGINT)
            waited.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            waited.append(2)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert waited == [1]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the computation of a step."""
    forward_backward = loop.Trainer.forward_backward

    def interrupted(self: loop.Trainer, *args: object) -> object:
        if self.clock.global_step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return forward_backward(self, *args)

    monkeypatch.setattr(loop.Trainer, "forward_backward", interrupted)


def test_a_stop_in_the_last_step_finds_a_finished_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(8, monkeypatch)
    outcome, said = train_here(config)
    assert not outcome.stopped
    assert steps_saved(outcome.folder) == [8]
    assert "done at step 8" in said


def test_a_stop_saves_what_was_done_by_then_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(4, monkeypatch)  # read one step late: step 5 is under way by then
    outcome, said = train_here(config, "--ckpt-every", "5")
    assert outcome.stopped
    assert steps_saved(outcome.folder) == [5]
    assert [line["step"] for line in metrics(outcome.folder)] == [1, 2, 3, 4, 5]
    assert said.rstrip().endswith(f"to go on: longtake train {outcome.folder}")


def test_a_run_that_saves_every_step_stops_too(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(4, monkeypatch)  # read before the checkpoint of that step
    outcome, _ = train_here(config, "--ckpt-every", "1")
    assert outcome.stopped
    assert steps_saved(outcome.folder)[-1] == 4
    assert [line["step"] for line in metrics(outcome.folder)] == [1, 2, 3, 4]
