"""Command lines of the documentation, run as they are pasted."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from tests.train.runs import run_command

Walk = Callable[[str], str]


def walk_in(capsys: pytest.CaptureFixture[str]) -> Walk:
    """A function from a command line to its output; the command must not fail."""

    def walk(line: str) -> str:
        program, *words = shlex.split(line)
        assert program == "longtake"
        code, out, error = run_command(capsys, words)
        assert code == 0, f"{line}\n{out}\n{error}"
        return out

    return walk
