"""Captions changed in place, and what stands before those of a table."""

from __future__ import annotations

import csv
import stat
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from longtake.cli.app import app
from longtake.contracts import UserError
from longtake.data.clips.captions import prefixed
from longtake.data.clips.video import write_video
from longtake.data.config import DatasetConfig
from longtake.data.loading.dataset import SlotDataset
from longtake.data.probing.listing import list_clips
from longtake.data.tables.captions import FromFiles, edit_captions
from longtake.data.tables.mix import open_clips

runner = CliRunner()
ROWS = 'path,text,num_frames,height,width,fps\na.mp4,red,9,32,32,8\nb.mp4,"blue, moves",9,32,32,8\n'


def texts(table: Path) -> list[str]:
    return [row["text"] for row in csv.DictReader(table.read_text("utf-8").splitlines())]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "clips.csv").write_text(ROWS)
    (tmp_path / "b.txt").write_text(" a blue square \n")
    return tmp_path / "clips.csv"


def test_captions_come_from_files_and_rules_and_nothing_else_changes(table: Path) -> None:
    words = ["--from-files", "--find", "blue", "--replace", "green", "--prefix", "x "]
    assert runner.invoke(app, ["data", "captions", str(table), *words]).exit_code == 0
    assert texts(table) == ["x red", "x a green square"]
    assert [row["num_frames"] for row in csv.DictReader(table.read_text().splitlines())] == ["9", "9"]
    before = table.stat().st_mtime_ns
    assert edit_captions(table, [lambda place, text: text]) == (0, 2)
    assert table.stat().st_mtime_ns == before


def test_an_editor_changes_lines_and_a_lost_line_changes_nothing(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    for script, outcome in (("sed -i s/red/pink/", ["pink", "blue, moves"]), ("sed -i 1d", None), ("exit 1; :", None)):
        editor.write_text(f'#!/bin/sh\n{script} "$1"\n')
        editor.chmod(stat.S_IRWXU)
        monkeypatch.setenv("VISUAL", str(editor))
        if outcome is None:
            with pytest.raises(UserError, match="nothing was changed"):
                edit_captions(table, [], in_editor=True)
        else:
            assert edit_captions(table, [], in_editor=True) == (1, 2)
        assert texts(table) == ["pink", "blue, moves"]


def test_a_prefix_stands_before_the_captions_of_its_table_once(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.csv"
    other.write_text(ROWS.replace("a.mp4", "c.mp4").replace("b.mp4", "d.mp4").replace("red", '"ohwx dog, red"'))
    mix = [(str(table), 1.0), (str(other), 1.0)]
    config = DatasetConfig(mix=mix, caption_prefix={str(other): "ohwx dog, "}, vmaf=False, fps_max=None)
    dataset = SlotDataset.__new__(SlotDataset)
    dataset.config, dataset.table = config, open_clips(config)
    assert [dataset.prefixed(dataset.table.caption(row), row) for row in range(4)] == [
        "red",
        "blue, moves",
        "ohwx dog, red",
        "ohwx dog, blue, moves",
    ]
    with pytest.raises(ValueError, match="is no table of this dataset; choose one of"):
        DatasetConfig(mix=mix, caption_prefix={"mine.csv": "x"})


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("a dog", "ohwx dog, a dog"),
        ("ohwx dog, a dog", "ohwx dog, a dog"),
        ("ohwx dog", "ohwx dog"),
        ("", "ohwx dog"),
        ("ohwx dogs", "ohwx dog, ohwx dogs"),
    ],
)
def test_a_prefix_in_the_table_is_what_a_run_would_put_there(table: Path, text: str, outcome: str) -> None:
    assert prefixed(text, "ohwx dog, ") == prefixed(text, "ohwx dog") == outcome
    edit_captions(table, [lambda place, old: text])
    assert runner.invoke(app, ["data", "captions", str(table), "--prefix", "ohwx dog, "]).exit_code == 0
    assert texts(table) == [outcome] * 2


def test_captions_beside_clips_are_read_alike_for_a_table_and_a_folder(table: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "b.mp4").touch()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa dog\r\n")  # as Notepad writes it
    assert list_clips(tmp_path).clips["text"].to_pylist() == ["", "a dog"]
    assert (
        "1 of 2 clips have a .txt file" in runner.invoke(app, ["data", "captions", str(table), "--from-files"]).output
    )
    assert texts(table) == ["red", "a dog"]


def test_a_folder_of_clips_is_sent_to_a_table_that_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", np.zeros((2, 16, 16, 3), np.uint8), 8)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"`longtake (data probe \. -o clips\.csv)`") as refused:
        edit_captions(Path(), [FromFiles()])
    words = str(refused.value).split("`longtake ")[1].split("`")[0].split()
    assert runner.invoke(app, words).exit_code == 0
    assert edit_captions(Path("clips.csv"), [FromFiles()]) == (0, 1)


def test_a_caption_without_a_file_beside_its_clip_stays(tmp_path: Path) -> None:
    files = FromFiles()
    for place in (str(tmp_path / "a.mp4"), "https://there/a.mp4"):
        assert files(place, "as it is") == "as it is"
    assert files.count == 0
