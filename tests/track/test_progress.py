"""A live line on a terminal, plain lines in a file, nothing on other ranks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from longtake.track import TrainingProgress, make_console


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
