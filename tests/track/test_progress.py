"""A live line on a terminal, plain lines in a file, nothing on other ranks."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from longtake.track.progress import TrainingProgress, make_console, task_progress


def run(console: Console, steps: range, total: int, **options) -> None:
    with TrainingProgress(total, steps.start - 1, console=console, **options) as progress:
        for step in steps:
            progress.update(step, {"loss": 1 / step, "clips/s": 12.345678})


def test_a_file_gets_a_plain_line_every_n_steps_and_one_for_the_last():
    out = io.StringIO()
    run(make_console(out), range(1, 26), 25, every=10)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0].startswith("step 10/25  loss 0.1  clips/s 12.35  ETA 0:00:0")
    assert "ETA" not in lines[2]
    assert "\x1b" not in out.getvalue()


def test_a_long_line_is_not_broken_in_a_file():
    out = io.StringIO()
    make_console(out).print("word " * 100)
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_live_line_with_the_numbers():
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, width=100, highlight=False), range(4, 9), 8)
    assert "8/8" in out.getvalue()
    assert "loss 0.125" in out.getvalue()


def test_the_terminal_is_given_back_after_an_error():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with pytest.raises(ZeroDivisionError), TrainingProgress(5, console=console) as progress:
        progress.update(1, {"loss": 1 / 0})
    hidden, shown = out.getvalue().rfind("\x1b[?25l"), out.getvalue().rfind("\x1b[?25h")
    assert -1 < hidden < shown


def test_other_ranks_print_nothing():
    out = io.StringIO()
    run(make_console(out), range(1, 26), 25, every=1, enabled=False)
    assert out.getvalue() == ""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("longtake.track.progress.time.perf_counter", lambda: self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


VALUES = {"loss": 0.1234, "clips_per_second": 12.34, "mfu": 0.4567, "grad_norm": 1.234, "lr": 1e-5, "goodput": 0.98}


@pytest.mark.parametrize("width", [60, 80, 100, 160, 240])
def test_terminal_of_any_width_shows_step_and_time_left_and_whole_values(width: int, clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, color_system=None)
    with TrainingProgress(100_000, 0, console=console) as progress:
        for step in range(1, 4):
            clock.seconds += 3600.0
            progress.update(step, VALUES)
    line = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", out.getvalue()).splitlines()[-1].rstrip()
    assert len(line) <= width
    assert re.match(r"train [\u2500-\u257f ]{5,20}\s+3/100000 ETA 4166 days, 13:00:00", line), line
    shown = line.partition("13:00:00")[2].split()
    texts = [part for name, value in VALUES.items() for part in (name, f"{value:.4g}")]
    assert shown == texts[: len(shown)]  # dropped from the right
    assert len(shown) % 2 == 0
    if width == 240:
        assert shown == texts


def test_time_left_is_that_of_recent_steps_without_validations(clock: Clock) -> None:
    out = io.StringIO()
    with TrainingProgress(600, 0, console=make_console(out), every=1) as progress:
        clock.seconds += 3000  # a validation and a compilation before step 1
        for step in range(1, 131):
            clock.seconds += 60 if step < 70 else 2
            progress.update(step, {})
            if step == 120:
                with progress.paused():
                    clock.seconds += 5000
    assert out.getvalue().splitlines()[-1].endswith("ETA 0:15:40")  # 470 steps of 2 s


def test_long_task_in_a_file_prints_a_line_every_half_minute(clock: Clock) -> None:
    out = io.StringIO()
    with task_progress(make_console(out), "digest") as show:
        for share in range(1, 101):
            clock.seconds += 1
            show(share / 100)
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["5%", "35%", "65%", "95%"]


def test_task_between_steps_is_shown_on_a_terminal_and_not_on_other_ranks() -> None:
    for enabled in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=80)
        with TrainingProgress(5, console=console, enabled=enabled) as progress:
            progress.task("validation videos")(0.5)
        assert ("validation videos 50%" in out.getvalue()) == enabled
