"""`dataset.memory_efficient`: a table is converted once to shards in a cache, and read from there."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.tables import convert
from longtake.data.tables.mix import open_clips
from longtake.data.tables.table import ClipTable

HEADER = "path,text,num_frames,height,width,fps"


def write(path: Path, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{row}.mp4,take {row},9,16,16,24" for row in range(count)]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def opened(path: Path, memory_efficient: bool | None = True) -> ClipTable:
    return open_clips(DatasetConfig(data_path=str(path), memory_efficient=memory_efficient))


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".shards"))


def test_the_table_is_the_same_and_lies_in_shards_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "clips.csv", 20)
    plain, mapped = opened(source, False), opened(source)
    assert len(kept(tmp_path)) == 1
    assert "converting it to shards, once" in capsys.readouterr().err
    assert mapped.fingerprint == plain.fingerprint
    assert mapped.source == source
    assert not mapped.clip_ids.flags.owndata
    for row in range(20):
        assert (mapped.caption(row), mapped.location(row)) == (plain.caption(row), plain.location(row))


def test_it_is_converted_once_and_again_when_it_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "clips.csv", 20)
    opened(source)
    capsys.readouterr()
    opened(source)
    assert capsys.readouterr().err == ""
    write(source, 30)
    assert len(opened(source)) == 30
    assert len(kept(tmp_path)) == 1, "the shards of the earlier state are removed"


def test_shards_that_a_process_reads_are_not_removed(tmp_path: Path) -> None:
    source = write(tmp_path / "clips.csv", 20)
    old = opened(source)
    write(source, 30)
    opened(source)
    assert len(kept(tmp_path)) == 2
    assert old.caption(19) == "take 19"
    del old
    write(source, 31)
    assert len(opened(source)) == 31
    assert len(kept(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "set" / "clips.csv", 20)
    (tmp_path / "set" / "3.mp4").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path / "set")))
    table = opened(source)
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["3.mp4", "clips.csv"]
    assert len(list((tmp_path / "cache" / "longtake" / "tables").glob("*/*.shards"))) == 1
    assert table.location(3) == str(tmp_path / "set" / "3.mp4")


def test_large_tables_are_mapped_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "clips.csv", 20)
    opened(source, None)
    assert kept(tmp_path) == []
    monkeypatch.setattr(convert, "LARGE_BYTES", 100)
    opened(source, False)
    assert kept(tmp_path) == []
    assert not opened(source, None).clip_ids.flags.owndata
    assert len(kept(tmp_path)) == 1


def test_what_a_killed_conversion_left_is_cleaned_up(tmp_path: Path) -> None:
    source = write(tmp_path / "clips.csv", 20)
    left = tmp_path / "..clips.csv.0123456789abcdef.shards.77-aa.partial"
    left.mkdir()
    opened(source)
    assert not left.exists()


def test_mistakes_are_those_of_any_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        opened(tmp_path / "none.csv")
    (tmp_path / "bare.csv").write_text("path,text\na.mp4,a\n")
    with pytest.raises(UserError, match="column num_frames, height, width, fps is missing"):
        opened(tmp_path / "bare.csv")
    assert kept(tmp_path) == []


def _open(source: Path, queue: multiprocessing.SimpleQueue) -> None:
    table = opened(source)
    queue.put((len(table), int(np.bitwise_xor.reduce(table.clip_ids)), table.caption(7)))


def test_processes_that_start_together_convert_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "clips.csv", 3000)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    crew = [context.Process(target=_open, args=(source, queue)) for _ in range(4)]
    for process in crew:
        process.start()
    found = [queue.get() for _ in crew]
    for process in crew:
        process.join()
    assert len(set(found)) == 1
    assert capfd.readouterr().err.count("converting it") == 1
    assert len(kept(tmp_path)) == 1
    assert not list(tmp_path.glob("*.partial"))
