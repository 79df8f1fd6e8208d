from __future__ import annotations

import csv
from pathlib import Path

import pytest

from longtake.data import ClipTable
from longtake.data.shapes import make_shapes


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A table of four clips and two stills, with a file cut short and one that is not there in the middle."""
    table = make_shapes(tmp_path, num_clips=4, num_stills=2).table
    lines = table.read_text().splitlines()
    (tmp_path / "clips" / "empty.mp4").write_bytes(b"")
    table.write_text("\n".join([*lines[:3], "clips/empty.mp4,nothing", "clips/gone.mp4,nobody", *lines[3:]]) + "\n")
    return table


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_file_costs_its_row_and_is_listed_with_the_reason(longtake, clips: Path, workers: int):
    target = clips.with_name("probed.parquet")
    code, out, err = longtake("data", "probe", clips, "-o", target, "--workers", workers)
    bad = clips.with_name("probed.bad.csv")
    assert (code, err) == (0, "")
    assert f"6 clips in {target}" in out
    assert f"warning: 2 bad files left out, listed with reasons in {bad}" in out
    assert len(ClipTable.open(target)) == 6
    with bad.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["reason"]) for row in rows] == [
        ("clips/empty.mp4", "the file is empty"),
        ("clips/gone.mp4", "no such file"),
    ]


def test_strict_fails_and_writes_no_table(mistake, clips: Path):
    target = clips.with_name("probed.parquet")
    said = mistake("data", "probe", clips, "-o", target, "--strict")
    assert "2 of 8 clips cannot be used" in said
    assert "clips/empty.mp4: the file is empty" in said
    assert not target.exists()


def test_a_table_of_good_files_gives_no_warning(longtake, tmp_path: Path):
    table = make_shapes(tmp_path, num_clips=2, num_stills=1).table
    code, out, _ = longtake("data", "probe", table, "--output", tmp_path / "t.csv")
    assert (code, out) == (0, f"3 clips in {tmp_path / 't.csv'}\n")


def test_mistakes_of_the_command_line_are_one_sentence(mistake, clips: Path, tmp_path: Path):
    assert "gone.csv" in mistake("data", "probe", tmp_path / "gone.csv", "-o", tmp_path / "t.csv")
    assert "column path is missing" in mistake("data", "probe", _captions(tmp_path), "-o", tmp_path / "t.csv")
    assert "tables end in .csv, .parquet or .arrow" in mistake("data", "probe", clips, "-o", tmp_path / "t.txt")
    assert "would overwrite" in mistake("data", "probe", clips, "-o", clips)
    assert "--output" in mistake("data", "probe", clips)
    assert "--workers" in mistake("data", "probe", clips, "-o", tmp_path / "t.csv", "--workers", "-1")


def _captions(folder: Path) -> Path:
    table = folder / "captions.csv"
    table.write_text("file,text\na.mp4,a cat\n")
    return table
