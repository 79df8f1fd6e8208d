"""A probe that is interrupted, in whatever way, goes on where it stopped and ends with the same table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.clips.video import write_video
from longtake.data.probing import probe
from longtake.data.probing.journal import Journal
from longtake.data.probing.one_file import ClipInfo, probe_file
from longtake.data.probing.probe import part_path, probe_table
from tests.data.made_clips import noise_frames
from tests.train.runs import PATIENCE_SECONDS

NUM_FILES = 30


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """`clips.csv` over thirty files, of which two are bad."""
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", noise_frames(5 + number, 32, 48), 24)
    (tmp_path / "empty.mp4").touch()
    names = [f"{row % 3}.mp4" for row in range(NUM_FILES)]
    names[4], names[20] = "empty.mp4", "gone.mp4"
    (tmp_path / "clips.csv").write_text("path,text\n" + "".join(f"{name},cat\n" for name in names))
    return tmp_path / "clips.csv"


class _Stop(Exception):
    pass


def _stop_after(calls: int) -> Callable[[str, bool], ClipInfo]:
    """A probe of files that breaks off after so many."""
    left = iter(range(calls))

    def probe_some(path: str, decode_check: bool) -> ClipInfo:
        if next(left, None) is None:
            raise _Stop
        return probe_file(path, decode_check)

    return probe_some


def _journal(target: Path) -> Path:
    return target.with_name(f"{target.name}.journal")


def test_a_restart_asks_only_what_is_not_answered(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, target = clips.with_name("whole.parquet"), clips.with_name("out.parquet")
    expected = probe_table(clips, whole)
    monkeypatch.setattr(probe, "probe_file", _stop_after(12))
    with pytest.raises(_Stop):
        probe_table(clips, target)
    assert not target.exists()
    monkeypatch.setattr(probe, "probe_file", _stop_after(NUM_FILES - 11))  # the bad one is asked again
    calls: list[tuple[int, int]] = []
    result = probe_table(clips, target, progress=lambda *call: calls.append(call))
    assert result.continued == 11
    assert result.bad_rows == expected.bad_rows
    assert calls == [(done, NUM_FILES) for done in range(11, NUM_FILES + 1)]
    assert target.read_bytes() == whole.read_bytes()
    assert not _journal(target).exists()


def test_mended_files_are_tried_again_after_strict(clips: Path) -> None:
    target = clips.with_name("out.csv")
    with pytest.raises(UserError, match="2 of 30"):
        probe_table(clips, target, strict=True)
    for name in ("empty.mp4", "gone.mp4"):
        (clips.parent / name).write_bytes((clips.parent / "0.mp4").read_bytes())
    result = probe_table(clips, target, strict=True)
    assert (result.continued, result.kept) == (NUM_FILES - 2, NUM_FILES)


@pytest.mark.parametrize("cut", [1, 7])
def test_a_half_written_line_is_dropped(cut: int, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = clips.with_name("out.csv")
    monkeypatch.setattr(probe, "probe_file", _stop_after(12))
    with pytest.raises(_Stop):
        probe_table(clips, target)
    monkeypatch.undo()
    os.truncate(_journal(target), _journal(target).stat().st_size - cut)
    assert probe_table(clips, target).continued == 10


@pytest.mark.parametrize(
    ("change", "named"),
    [({"decode_check": True}, "decode_check False there, True here"), ({"root": "elsewhere"}, "root ")],
)
def test_answers_to_another_question_are_refused(change: dict, named: str, clips: Path) -> None:
    (clips.parent / "elsewhere").mkdir()
    change = {name: clips.parent / value if name == "root" else value for name, value in change.items()}
    target = clips.with_name("out.csv")
    with pytest.raises(UserError):
        probe_table(clips, target, strict=True)
    with pytest.raises(UserError) as raised:
        probe_table(clips, target, **change)
    assert f"{_journal(target)}: was begun with another input ({named}" in str(raised.value)
    assert "delete it to start over" in str(raised.value)


def test_answers_about_another_table_are_refused(clips: Path) -> None:
    target = clips.with_name("out.csv")
    with pytest.raises(UserError):
        probe_table(clips, target, strict=True)
    clips.write_text(clips.read_text() + "0.mp4,one more\n")
    with pytest.raises(UserError, match="was begun with another input \\(table"):
        probe_table(clips, target)


def test_a_file_that_is_no_journal_is_left_alone(clips: Path) -> None:
    target = clips.with_name("out.csv")
    _journal(target).write_text("my notes\n")
    with pytest.raises(UserError, match="is not a journal of Longtake"):
        probe_table(clips, target)
    assert _journal(target).read_text() == "my notes\n"


def test_two_probes_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {}), pytest.raises(UserError, match="another process is writing it"):
        Journal(tmp_path / "j", {})


def test_a_journal_states_its_format(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {"table": "x"}) as journal:
        journal.add(3, "reason")
        journal.add(4, [5])
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert lines == [{"format": "longtake journal", "version": 1, "table": "x"}, [3, "reason"], [4, [5]]]


def test_a_wrong_root_does_not_stand_in_the_way_of_the_right_one(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = clips.with_name("out.csv")
    with pytest.raises(UserError, match="no clip is usable"):
        probe_table(clips, target, root=tmp_path / "elsewhere")
    assert not _journal(target).exists()
    assert probe_table(clips, target, root=tmp_path).kept == NUM_FILES - 2


def test_an_interrupt_before_the_first_answer_leaves_no_journal(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe_file", _stop_after(0))
    with pytest.raises(_Stop):
        probe_table(clips, clips.with_name("out.csv"))
    assert not _journal(clips.with_name("out.csv")).exists()


def test_a_journal_of_reasons_alone_is_begun_anew(tmp_path: Path) -> None:
    """As a kill leaves it."""
    lines = [{"format": "longtake journal", "version": 1, "root": "wrong"}, [0, "no such file"]]
    (tmp_path / "j").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Journal(tmp_path / "j", {"root": "right"}) as journal:
        assert list(journal.read()) == []
        journal.add(0, [5])
    with Journal(tmp_path / "j", {"root": "right"}) as journal:
        assert list(journal.read()) == [(0, [5])]


@pytest.mark.parametrize(
    "line",
    [
        *("[1, [1, 2]]", '[1, [5, "x", 32, 24, 1, "h264"]]', '[-1, "gone"]', '[99, [5, 32, 48, 24, 1, "h264"]]'),
        *('{"a": 1}', "[" * 100_000, "no line", "[1, [1e400, 32, 48, 24, 1, 2]]"),
    ],
)
def test_a_damaged_line_of_a_journal_is_one_sentence(line: str, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = clips.with_name("out.csv")
    monkeypatch.setattr(probe, "probe_file", _stop_after(12))
    with pytest.raises(_Stop):
        probe_table(clips, target)
    monkeypatch.undo()
    with open(_journal(target), "a") as journal:
        journal.write(line + "\n")
    with pytest.raises(UserError, match=r"out.csv.journal: .*; delete the file"):
        probe_table(clips, target)


# `longtake`; each process of a probe waits behind 300 files until it or its parent is killed.
WAITING = """
import os, sys, time
from longtake.cli import main
from longtake.data.probing import probe

probe_file, count, parent = probe.probe_file, 0, os.getppid()


def waiting(path, decode_check):
    global count
    count += 1
    while count > 300 and os.getppid() == parent:
        time.sleep(0.02)
    return probe_file(path, decode_check)


probe.probe_file = waiting
if __name__ == "__main__":
    main(sys.argv[1:])
"""


@contextmanager
def in_the_middle(clips: Path, target: Path, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A probe of a thousand files that has answers in its journal and does not come to its end by itself; it is killed
    at the end, if it still runs."""
    program = clips.with_name("waiting.py")
    program.write_text(WAITING, encoding="utf-8")
    lines = clips.read_text().splitlines()
    clips.write_text("\n".join(lines[:1] + (lines[1:4] + lines[6:8]) * 200) + "\n")
    arguments = ["data", "probe", str(clips), "-o", str(target), "--workers", str(workers), "--decode-check"]
    running = subprocess.Popen(
        [sys.executable, str(program), *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (_journal(target).exists() and _journal(target).stat().st_size > 6000):
            assert time.monotonic() < deadline, "nothing is written"
            assert running.poll() is None, "it ended by itself"
            time.sleep(0.01)
        yield running
    finally:
        if running.poll() is None:
            running.kill()


def test_a_worker_whose_parent_was_killed_ends_quietly(clips: Path) -> None:
    with in_the_middle(clips, clips.with_name("out.csv"), 2) as running:
        running.kill()
    _, said = running.communicate(timeout=PATIENCE_SECONDS)  # ends when the last worker has
    assert said == ""


@pytest.mark.parametrize(("kind", "workers"), [(signal.SIGKILL, 0), (signal.SIGINT, 2)])
def test_a_killed_probe_goes_on(kind: signal.Signals, workers: int, clips: Path) -> None:
    """In the middle of a thousand files, by a signal that can be heard or not."""
    target, whole = clips.with_name("out.jsonl"), clips.with_name("whole.jsonl")
    with in_the_middle(clips, target, workers) as running:
        if kind == signal.SIGINT:
            os.killpg(running.pid, kind)  # as a terminal does: everyone hears it
        else:
            running.kill()
        _, said = running.communicate(timeout=PATIENCE_SECONDS)
    assert not target.exists()
    if kind == signal.SIGINT:
        assert running.returncode == 130
        assert "of 1000 files are probed; the same command continues from there" in said
        assert "Traceback" not in said
    result = probe_table(clips, target, decode_check=True)
    assert 64 <= result.continued < 1000
    probe_table(clips, whole, decode_check=True)
    assert target.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_one_after_the_other_are_the_whole(count: int, clips: Path) -> None:
    whole, target = clips.with_name("whole.jsonl"), clips.with_name("out.jsonl")
    expected = probe_table(clips, whole)
    results = [probe_table(clips, target, part=(number, count)) for number in range(1, count + 1)]
    assert [result.target for result in results] == [part_path(target, number + 1, count) for number in range(count)]
    assert b"".join(result.target.read_bytes() for result in results) == whole.read_bytes()
    assert sum((result.bad_rows for result in results), ()) == expected.bad_rows


def test_parts_get_the_same_kinds_of_columns(clips: Path) -> None:
    lines = clips.read_text().splitlines()
    marked = [lines[0] + ",mark", *(f"{line},{row if row < 20 else 'x'}" for row, line in enumerate(lines[1:]))]
    clips.write_text("\n".join(marked) + "\n")
    schemas = [
        pyarrow.parquet.read_schema(probe_table(clips, clips.with_name("o.parquet"), part=(number, 3)).target)
        for number in (1, 2, 3)
    ]
    assert schemas[0].equals(schemas[1])
    assert schemas[0].equals(schemas[2])


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1, 0)])
def test_a_part_that_does_not_exist_is_refused(part: tuple[int, int], clips: Path) -> None:
    with pytest.raises(UserError, match="parts are counted from 1"):
        probe_table(clips, clips.with_name("o.csv"), part=part)
