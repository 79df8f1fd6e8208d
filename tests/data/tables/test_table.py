from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.tables.table import ClipTable
from longtake.random import hash64

HEADER = "path,text,num_frames,height,width,fps"
ROWS = ["a.mp4,a cat,33,48,64,24", 'sub/b.mp4,"one, two",10,20,30,29.97', "c.png,,1,16,16,"]


def write(folder: Path, rows: list[str] = ROWS, header: str = HEADER, name: str = "clips.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_numbers_are_arrays_and_strings_are_read_by_row(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path))
    assert len(table) == 3
    assert table.num_frames.tolist() == [33, 10, 1]
    assert table.height.tolist() == [48, 20, 16]
    assert table.width.tolist() == [64, 30, 16]
    assert table.num_frames.dtype == table.height.dtype == table.width.dtype == np.int64
    np.testing.assert_array_equal(table.fps, [24, 29.97, np.nan])
    assert np.isnan(table.motion_score).all()
    assert [table.caption(row) for row in range(3)] == ["a cat", "one, two", ""]
    assert table.clip_ids.dtype == np.uint64
    assert table.invalid == {}


def test_the_same_clips_are_the_same_table_in_every_format(tmp_path: Path) -> None:
    source = write(tmp_path)
    csv = ClipTable.open(source)
    columns = pyarrow.csv.read_csv(source)
    pyarrow.parquet.write_table(columns, tmp_path / "clips.parquet")
    with pa.OSFile(str(tmp_path / "clips.arrow"), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
        writer.write_table(columns)
    for name in ("clips.parquet", "clips.arrow"):
        other = ClipTable.open(tmp_path / name)
        assert other.fingerprint == csv.fingerprint
        np.testing.assert_array_equal(other.clip_ids, csv.clip_ids)
        np.testing.assert_array_equal(other.fps, csv.fps)
        assert [other.caption(row) for row in range(3)] == [csv.caption(row) for row in range(3)]
        assert [other.location(row) for row in range(3)] == [csv.location(row) for row in range(3)]


def test_relative_paths_start_from_the_tables_folder_or_the_root(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    source = write(tmp_path, [*ROWS, "/data/d.mp4,x,1,16,16,"])
    assert ClipTable.open(source).location(1) == str(tmp_path / "sub/b.mp4")
    rooted = ClipTable.open(source, root=tmp_path / "videos")
    assert rooted.location(1) == str(tmp_path / "videos/sub/b.mp4")
    assert rooted.location(3) == "/data/d.mp4"
    assert rooted.written_path(1) == "sub/b.mp4"


def test_ids_follow_the_path_and_tell_equal_paths_apart(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path, [ROWS[0], ROWS[1], ROWS[0]]))
    assert table.clip_ids.tolist() == [hash64("a.mp4", 0), hash64("sub/b.mp4", 0), hash64("a.mp4", 1)]
    moved = ClipTable.open(write(tmp_path, [ROWS[1], ROWS[0]]))
    assert moved.clip_ids.tolist() == [hash64("sub/b.mp4", 0), hash64("a.mp4", 0)], "ids do not depend on the row"


def test_ids_of_the_table_are_used(tmp_path: Path) -> None:
    largest = 2**64 - 1
    source = write(tmp_path, [f"{ROWS[0]},{largest}", f"{ROWS[1]},7"], HEADER + ",clip_id")
    assert ClipTable.open(source).clip_ids.tolist() == [largest, 7]


@pytest.mark.parametrize(
    "row", ["a.mp4,a cat,34,48,64,24", "a.mp4,a cat,33,48,64,25", "b.mp4,a cat,33,48,64,24", "a.mp4,a cat,33,48,65,24"]
)
def test_the_fingerprint_follows_clips_and_sizes(row: str, tmp_path: Path) -> None:
    before = ClipTable.open(write(tmp_path)).fingerprint
    assert ClipTable.open(write(tmp_path, [row, *ROWS[1:]])).fingerprint != before


def test_the_fingerprint_ignores_captions(tmp_path: Path) -> None:
    before = ClipTable.open(write(tmp_path)).fingerprint
    assert ClipTable.open(write(tmp_path, [ROWS[0].replace("a cat", "a dog"), *ROWS[1:]])).fingerprint == before


def test_a_table_travels_as_its_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [f"{number}.mp4,{'long text ' * 50},33,48,64,24" for number in range(500)])
    monkeypatch.chdir(tmp_path)
    table = ClipTable.open("clips.csv")
    data = pickle.dumps(table)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    copy = pickle.loads(data)
    assert copy.fingerprint == table.fingerprint
    assert copy.location(3) == str(tmp_path / "3.mp4")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a.mp4,x,-3,48,64,24", "num_frames is -3, expected a whole number from 1"),
        ("a.mp4,x,2.5,48,64,24", "num_frames is 2.5, expected a whole number from 1"),
        ("a.mp4,x,33,,64,24", "height is empty, expected a whole number from 1"),
        ("a.mp4,x,33,48,nan,24", "width is empty, expected a whole number from 1"),
        ("a.mp4,x,33,48,1e300,24", r"width is 1e+300, expected a whole number from 1"),
        ("a.mp4,x,33,48,64,-1", "fps is -1, expected 0 or more, or empty where unknown"),
        (",x,33,48,64,24", "path is empty"),
    ],
)
def test_a_row_with_bad_numbers_stays_and_says_why_it_is_not_used(row: str, reason: str, tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path, [ROWS[0], row, ROWS[1]]))
    assert table.invalid == {1: f"line 3: {reason}"}
    assert table.num_frames.tolist() == [33, 0, 10]
    assert len(table) == 3


@pytest.mark.parametrize(
    ("rows", "header", "sentence"),
    [
        (
            ["a.mp4,x,64"],
            "path,text,width",
            "clips.csv: column num_frames, height, fps is missing (found path, text, width); "
            "`longtake data probe clips.csv -o clips.parquet` makes a table with num_frames, height, width and fps "
            "of one with path and text",
        ),
        ([], HEADER, "clips.csv: the table has no rows; list one clip a row with its path and text"),
        (
            [f"{ROWS[0]},5", f"{ROWS[1]},5"],
            HEADER + ",clip_id",
            "clips.csv: rows 0 and 1 have the same clip_id 5; "
            "ids must differ: leave the column out to have them made from the paths",
        ),
        (
            ["a.mp4,x,y,33,48,64,24"],
            "path,text,text,num_frames,height,width,fps",
            "clips.csv: there are several columns text; names of columns must differ",
        ),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(
    rows: list[str], header: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, rows, header)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        ClipTable.open("clips.csv")
    assert str(raised.value) == sentence


def test_a_file_that_is_no_table_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "bad.parquet").write_text("not parquet")
    (tmp_path / "bad.arrow").write_text("not arrow")
    (tmp_path / "clips.txt").touch()
    for name, part in [
        ("none.csv", "no such file; give a clip table as .csv, .parquet, .arrow, .json, .jsonl or shards"),
        ("empty.csv", "the file is empty; its first line should name the columns"),
        ("bad.parquet", "cannot be read as parquet"),
        ("bad.arrow", "cannot be read as arrow"),
        ("clips.txt", "tables end in .csv, .parquet, .arrow, .feather, .json or .jsonl, not '.txt'"),
    ]:
        with pytest.raises(UserError) as raised:
            ClipTable.open(tmp_path / name)
        assert part in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; name the one relative paths start from"):
        ClipTable.open(write(tmp_path), root=tmp_path / "nowhere")


def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path, ["001,0042,33,48,64,24", "nan,NULL,33,48,64,24"]))
    assert [table.written_path(row) for row in (0, 1)] == ["001", "nan"]
    assert [table.caption(row) for row in (0, 1)] == ["0042", "NULL"]


def test_captions_may_hold_line_breaks_and_any_script(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path, ['a.mp4,"first\nsecond, ""quoted"" 猫",33,48,64,24']))
    assert table.caption(0) == 'first\nsecond, "quoted" 猫'
