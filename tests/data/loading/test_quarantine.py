from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longtake.contracts import ClipFault, UserError
from longtake.data.loading.quarantine import append_quarantine, read_quarantine

BIG = 2**64 - 1


def test_a_line_is_on_disk_when_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced, fsync = tmp_path / "quarantine.jsonl", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or fsync(file))
    append_quarantine(path, [ClipFault("a.mp4", 1, 0, "x")])
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino], "the line, then the new file's name"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) == {}
    named = ClipFault("b ✓.mp4", 5, 0, "the file is empty")
    append_quarantine(path, [ClipFault("a.mp4", BIG, 0, "no such file"), named])
    append_quarantine(path, [ClipFault("a.mp4", BIG, 3, "no such file")])
    append_quarantine(path, [])
    assert read_quarantine(path) == {BIG: 0, 5: 0}, "the first pass counts"
    assert json.loads(path.read_text().splitlines()[1]) == {
        "path": "b ✓.mp4",
        "sample": 5,
        "pass_index": 0,
        "reason": "the file is empty",
        "version": 1,
    }


def test_a_line_of_a_newer_version_is_refused_by_its_number_and_one_without_a_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    line = {"path": "a.mp4", "sample": 1, "pass_index": 0, "reason": "x"}
    path.write_text(json.dumps(line) + "\n")
    assert read_quarantine(path) == {1: 0}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"version": 9}) + "\n")
    with pytest.raises(UserError, match=r"quarantine.jsonl:2: has format version 9, and .* reads up to version 1"):
        read_quarantine(path)


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_line_cut_off_by_a_crash_hides_nothing_else(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    append_quarantine(path, [ClipFault("a.mp4", 1, 0, "x")])
    append_quarantine(path, [ClipFault("b.mp4", 2, 0, "x")])
    path.write_bytes(path.read_bytes()[:-cut])
    whole = {1: 0, 2: 0} if cut == 1 else {1: 0}  # cut by one byte, only the line end is missing
    assert read_quarantine(path) == whole
    append_quarantine(path, [ClipFault("c.mp4", 3, 1, "x")])
    append_quarantine(path, [ClipFault("d.mp4", 4, 1, "x")])
    assert read_quarantine(path) == whole | {3: 1, 4: 1}


def test_a_damaged_line_is_named_instead_of_skipped(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    append_quarantine(path, [ClipFault("a.mp4", 1, 0, "x")])
    path.write_text("hello\n" + path.read_text())
    with pytest.raises(
        UserError, match=r"quarantine.jsonl:1: 'hello' is not a quarantine entry; mend or delete the line"
    ):
        read_quarantine(path)
