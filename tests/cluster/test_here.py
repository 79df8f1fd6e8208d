"""`longtake launch` without hosts: processes of this machine, and only our sentence where they fail."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from longtake.cluster.here import _first
from tests.train.runs import finish, start


def launched(*words: object) -> tuple[int, str, str]:
    """What `longtake launch` of two processes ends with."""
    return finish(start("launch", "--nproc-per-node", 2, "--", *words))


def test_a_mistake_is_one_sentence_and_its_status(tmp_path: Path) -> None:
    code, out, err = launched("train", "custom", "--dataset.data-path", tmp_path / "none.csv")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"longtake: .*none\.csv: no such file; [^\n]*\n", err)


def test_torchrun_by_itself_ends_with_the_sentence_in_its_report(tmp_path: Path) -> None:
    words = ("train", "custom", "--dataset.data-path", tmp_path / "none.csv")
    code, _, err = finish(start(*words, processes=2))
    assert code == 1
    report = err[err.index("Root Cause") :]
    assert f"traceback : longtake: {tmp_path}/none.csv: no such file" in report


def test_a_program_ends_with_the_status_of_the_process_that_failed_first(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, signal, sys\nos.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\n")
    code, _, err = launched(program)
    assert (code, err) == (128 + signal.SIGKILL, "longtake: rank 1 was ended by SIGKILL, and the others with it\n")


@pytest.mark.parametrize(
    ("ended", "first"),
    [
        ([(0, -15), (1, 2)], (1, 2)),
        ([(0, -15), (1, -9)], (1, -9)),
        ([(0, 76), (1, 76)], (0, 76)),
        ([(3, -15)], (3, -15)),
    ],
)
def test_those_that_torchrun_ends_are_not_the_cause(ended: list[tuple[int, int]], first: tuple[int, int]) -> None:
    assert _first(ended) == first
