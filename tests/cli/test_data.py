from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from longtake.cli import console
from longtake.data.shapes import make_shapes
from longtake.data.tables.table import ClipTable


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A table of four clips and two stills, with a file cut short and one that is not there in the middle."""
    table = make_shapes(tmp_path, num_clips=4, num_stills=2)
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
    table = make_shapes(tmp_path, num_clips=2, num_stills=1)
    code, out, _ = longtake("data", "probe", table, "--output", tmp_path / "t.csv")
    assert (code, out) == (0, f"3 clips in {tmp_path / 't.csv'}\n")


def test_captions_under_another_name_are_said_to_be_missing_before_the_first_file(longtake, tmp_path: Path):
    table = make_shapes(tmp_path, num_clips=2, num_stills=1)
    table.write_text(table.read_text().replace("path,text", "path,caption"))
    code, out, _ = longtake("data", "probe", table, "--output", tmp_path / "t.parquet")
    assert code == 0
    said = " ".join(out.split())
    assert "warning:" in said
    assert "there is no column text (found path, caption), so no clip has a caption" in said
    assert "--dataset.captions.caption 1" in said
    assert ClipTable.open(tmp_path / "t.parquet", captions=("caption",)).caption(0, "caption") != ""
    table.write_text(table.read_text().replace("path,caption", "path, text"))
    code, out, _ = longtake("data", "probe", table, "--output", tmp_path / "u.parquet")
    assert (code, out) == (0, f"3 clips in {tmp_path / 'u.parquet'}\n")


def test_mistakes_of_the_command_line_are_one_sentence(mistake, clips: Path, tmp_path: Path):
    assert "gone.csv" in mistake("data", "probe", tmp_path / "gone.csv", "-o", tmp_path / "t.csv")
    assert "column path is missing" in mistake("data", "probe", _captions(tmp_path), "-o", tmp_path / "t.csv")
    assert "tables end in .csv, .parquet, .arrow, .json or .jsonl" in mistake(
        "data", "probe", clips, "-o", tmp_path / "t.txt"
    )
    assert "would overwrite" in mistake("data", "probe", clips, "-o", clips)
    assert "--output" in mistake("data", "probe", clips)
    assert "--workers" in mistake("data", "probe", clips, "-o", tmp_path / "t.csv", "--workers", "-1")


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "-inf"])
def test_a_cache_size_that_is_none_is_refused(mistake, clips: Path, size: str):
    said = mistake("data", "probe", clips, "-o", clips.with_name("o.csv"), "--cache-gb", size)
    assert "--cache-gb" in said


@pytest.mark.parametrize("url", ["https://x.y/clips.csv", "s3://bucket/set", "https://x.y/clips.json"])
def test_a_table_on_a_server_is_refused_with_its_url(mistake, clips: Path, tmp_path: Path, url: str):
    sentence = f"{url}: a table must lie on this machine"
    assert sentence in mistake("data", "probe", url, "-o", tmp_path / "t.csv")
    assert sentence in mistake("data", "filter", url, "-o", tmp_path / "t.csv", "--where", "fps > 1")
    target = f"{url.rpartition('/')[0]}/t.csv"
    assert f"{target}: a table must lie" in mistake("data", "probe", clips, "-o", target)


def test_parts_of_a_table_are_probed_one_by_one(longtake, mistake, clips: Path):
    longtake("data", "probe", clips, "-o", clips.with_name("whole.jsonl"))
    texts = []
    for part in ("1/3", "2/3", "3/3"):
        code, out, _ = longtake("data", "probe", clips, "-o", clips.with_name("out.jsonl"), "--part", part)
        target = clips.with_name(f"out.part-0000{part[0]}-of-00003.jsonl")
        assert code == 0
        assert f"clips in {target}" in out
        texts.append(target.read_text())
    assert "".join(texts) == clips.with_name("whole.jsonl").read_text()
    for wrong in ("4/3", "0/3", "1", "1/x"):
        assert f"--part {wrong}" in mistake("data", "probe", clips, "-o", clips.with_name("o.csv"), "--part", wrong)


def test_the_same_command_continues_after_strict(longtake, mistake, clips: Path):
    target = clips.with_name("probed.parquet")
    mistake("data", "probe", clips, "-o", target, "--strict", "--decode-check")
    code, out, _ = longtake("data", "probe", clips, "-o", target, "--decode-check")
    assert code == 0
    assert "6 were probed before" in out


def test_where_nobody_watches_a_line_tells_rate_and_time_left(longtake, clips: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)
    _, _, err = longtake("data", "probe", clips, "-o", clips.with_name("o.csv"))
    assert re.search(r"^probed 4/8  [\d,]+ files/s  0:00:00 left$", err, re.MULTILINE)


def _captions(folder: Path) -> Path:
    table = folder / "captions.csv"
    table.write_text("file,text\na.mp4,a cat\n")
    return table
