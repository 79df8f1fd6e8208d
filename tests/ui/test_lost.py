"""What could not be read is listed with its reasons, and one list that is damaged hides no other."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from longtake.contracts import ClipFault
from longtake.data.loading.quarantine import append_quarantine
from longtake.train.folder import QUARANTINE_FILE
from longtake.train.run_file import CONFIG_FILE
from longtake.ui.data import Clips
from longtake.ui.roots import Roots


def rows(page: str) -> list[tuple[str, ...]]:
    """The cells of each row."""
    return [
        tuple(unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL))
        for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    ]


def a_run(folder: Path, *faults: ClipFault) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("")
    append_quarantine(folder / QUARANTINE_FILE, faults)
    return folder / QUARANTINE_FILE


def test_every_reason_is_shown_with_its_clip_and_run(tmp_path: Path) -> None:
    a_run(tmp_path / "one", ClipFault("gone.mp4", 3, 0, "ends too early"), ClipFault("<b>.mp4", 4, 2, "no <frame>"))
    a_run(tmp_path / "two", ClipFault("gone.mp4", 3, 1, "is not there"))
    (tmp_path / "clips.bad.csv").write_text("path,reason\nempty.mp4,has no bytes\n")
    assert sorted(rows(Clips(Roots.of([tmp_path])).lost())) == [
        ("<b>.mp4", "no <frame>", "one, pass 2"),
        ("empty.mp4", "has no bytes", "clips.bad.csv"),
        ("gone.mp4", "ends too early", "one, pass 0"),
        ("gone.mp4", "is not there", "two, pass 1"),
    ]


def test_a_damaged_list_is_named_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    a_run(tmp_path / "many", *(ClipFault(f"{i}.mp4", i, 0, "ends too early") for i in range(250)))
    damaged = a_run(tmp_path / "damaged", ClipFault("a.mp4", 3, 0, "ends too early"))
    damaged.write_text("no entry\n" + damaged.read_text())
    (tmp_path / "old.bad.csv").write_text("clip\na.mp4\n")
    page = Clips(Roots.of([tmp_path])).lost()
    assert len(rows(page)) == 200
    assert "The first 200 of 250." in page
    assert f"{damaged}:1:" in unescape(page)
    assert "old.bad.csv: has no columns path and reason" in page
