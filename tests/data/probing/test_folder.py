"""A folder of clips as a training set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.clips.video import write_image, write_video
from longtake.data.config import DatasetConfig
from longtake.data.probing.folder import TABLE
from longtake.data.probing.probe import probe_table
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.mix import MixedTable, open_clips
from longtake.data.tables.table import caption_lines
from tests.data.made_clips import noise_frames


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`set` with a video and a picture that have captions, one below that has none, and what is no clip."""
    place = tmp_path / "set"
    (place / "deep" / "er").mkdir(parents=True)
    write_video(place / "b one.mp4", noise_frames(9, 32, 48), 8)
    write_video(place / "deep" / "er" / "a.mp4", noise_frames(5, 32, 48), 8)
    write_image(place / "c.png", noise_frames(1, 16, 24)[0])
    (place / "b one.txt").write_text("a grey storm\n")
    (place / "c.txt").write_text("a still")
    (place / "notes.md").write_text("nothing")
    (place / ".hidden").mkdir()
    shutil.copy(place / "c.png", place / ".hidden" / "d.png")
    return place


def opened(place: Path) -> list[tuple[str, str, int]]:
    table = open_clips(DatasetConfig(data_path=str(place)))
    assert all(Path(table.location(row)).is_file() for row in range(len(table)))
    return [(table.written_path(row), table.caption(row), int(table.num_frames[row])) for row in range(len(table))]


ALL = [("b one.mp4", "a grey storm", 9), ("c.png", "a still", 1), ("deep/er/a.mp4", "", 5)]


def test_a_folder_is_walked_and_probed_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert opened(folder) == ALL
    assert "probing 3 of 3 files" in capsys.readouterr().err
    assert opened(folder) == ALL
    assert capsys.readouterr().err == ""
    ids = open_clips(DatasetConfig(data_path=str(folder))).clip_ids
    assert ids.tolist() == compute_clip_ids([path for path, _, _ in ALL]).tolist()


def test_captions_that_a_folder_lacks_are_looked_for_beside_the_clips(folder: Path) -> None:
    said = caption_lines([open_clips(DatasetConfig(data_path=str(folder)))], None)
    assert said == (
        "warning: captions: column text, empty for 1 of 3 clips (deep/er/a.mp4); "
        "of a folder, the caption of a.mp4 is the text in a.txt beside it"
    )


def test_files_that_come_go_and_change_are_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(folder)
    capsys.readouterr()
    write_video(folder / "a.mp4", noise_frames(4, 32, 48), 8)
    (folder / "c.png").unlink()
    (folder / "b one.txt").write_text("a blue storm")
    assert opened(folder) == [("a.mp4", "", 4), ("b one.mp4", "a blue storm", 9), ALL[2]]
    assert "probing 2 of 3 files" in capsys.readouterr().err


def test_a_bad_file_is_listed_and_tried_again_when_something_changes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.mp4").write_bytes(b"")
    assert opened(folder) == ALL
    assert "1 files cannot be used" in capsys.readouterr().err
    assert "bad.mp4" in (folder / ".longtake.bad.csv").read_text()
    assert opened(folder) == ALL
    assert capsys.readouterr().err == ""
    write_video(folder / "bad.mp4", noise_frames(3, 32, 48), 8)
    assert opened(folder) == [("bad.mp4", "", 3), *ALL] or opened(folder)[1][0] == "bad.mp4"
    assert not (folder / ".longtake.bad.csv").exists()


def test_a_folder_that_cannot_be_written_stays_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(folder.rglob("*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(folder)))
    assert opened(folder) == ALL
    assert sorted(folder.rglob("*")) == before


def test_folders_and_tables_mix(folder: Path, tmp_path: Path) -> None:
    probe_table(folder, tmp_path / "clips.parquet")
    config = DatasetConfig(mix=[(str(folder), 1.0), (str(tmp_path / "clips.parquet"), 2.0)], root=str(tmp_path))
    table = open_clips(config)
    assert isinstance(table, MixedTable)
    assert Path(table.location(1)) == folder / "c.png"
    assert Path(table.location(4)) == folder / "c.png"


def test_a_folder_without_a_usable_clip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UserError, match="no video or picture in it or below"):
        opened(tmp_path)
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of its 1 videos and pictures can be used.*a.mp4: the file is empty"):
        opened(tmp_path)


def test_probing_a_folder_writes_paths_that_start_from_the_table(folder: Path, tmp_path: Path) -> None:
    result = probe_table(folder, tmp_path / "tables" / "clips.parquet")
    table = pa.parquet.read_table(result.target)
    assert table["path"].to_pylist() == [f"../set/{path}" for path, _, _ in ALL]
    assert table["text"].to_pylist() == [text for _, text, _ in ALL]
    assert "changed" not in table.column_names
    assert not (folder / TABLE).exists()
