from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.tables import convert, rows, shards
from longtake.data.tables.convert import make_shards
from longtake.data.tables.shards import TableShards
from longtake.data.tables.table import ClipTable
from longtake.data.tables.write_rows import write_table

ARRAYS = ("num_frames", "height", "width", "fps", "motion_score", "clip_ids")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 8 rows and files of 32, so that a hundred rows meet every border."""
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", 8)
    monkeypatch.setattr(convert, "ROWS_PER_FILE", 32)


def clips(count: int = 100) -> pa.Table:
    """Clips with repeated paths, empty cells, odd texts and a few rows whose numbers make no sense."""
    random = np.random.default_rng(1)
    fps = [None if row % 7 == 3 else float(rate) for row, rate in enumerate(random.uniform(5, 60, count))]
    return pa.table(
        {
            "path": [f"v/{row % 60:03d} ✓.mp4" for row in range(count)],
            "text": [None if row % 9 == 5 else f'take {row}, "said", a\nline' for row in range(count)],
            "num_frames": [0 if row == 4 else int(n) for row, n in enumerate(random.integers(1, 300, count))],
            "height": random.integers(16, 2000, count),
            "width": random.integers(16, 2000, count),
            "fps": pa.array(fps, pa.float64()),
            "score_vmafmotion": random.uniform(0, 20, count),
            "score_aes": random.uniform(0, 10, count),
            "text_short": [f"short {row}" for row in range(count)],
        }
    )


def write(columns: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(columns, path)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(columns, path, row_group_size=33)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
            writer.write_table(columns)
    else:
        write_table(columns, path)
    return path


def assert_same(one: ClipTable, other: ClipTable, captions: tuple[str, ...] = ("text", "text_short")) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert getattr(one, name).dtype == getattr(other, name).dtype
    assert one.invalid == other.invalid
    assert one.fingerprint == other.fingerprint
    for row in range(len(one)):
        assert [one.caption(row, name) for name in captions] == [other.caption(row, name) for name in captions]
        assert os.path.normpath(one.location(row)) == os.path.normpath(other.location(row))


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow", ".json", ".jsonl"])
def test_shards_are_the_same_table(tmp_path: Path, suffix: str) -> None:
    source = write(clips(), tmp_path / f"clips{suffix}")
    done = make_shards(source, tmp_path / "clips.shards")
    assert (done.rows, done.invalid) == (100, 1)
    assert len(list(done.folder.glob("0*.arrow"))) == 4
    columns = ("text", "text_short")
    assert_same(ClipTable.open(source, captions=columns), ClipTable.open(done.folder, captions=columns))
    assert_same(
        ClipTable.open(done.folder, captions=columns), ClipTable.open(done.folder / "index.json", captions=columns)
    )


def test_a_column_that_looks_like_numbers_at_first_stays_text_if_it_is_not(tmp_path: Path) -> None:
    lines = ["path,text,num_frames,height,width,fps,take,score"]
    lines += [
        f"{row}.mp4,a,9,16,16,{'NULL' if row == 3 else 24},{'007' if row == 20 else row},{row}" for row in range(30)
    ]
    lines[30] = lines[30].rsplit(",", 1)[0] + ",0.5"
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    made = make_shards(tmp_path / "clips.csv", tmp_path / "clips.shards").folder
    schema = rows.open_rows(made).schema
    assert [str(schema.field(name).type) for name in ("path", "fps", "take", "score")] == (
        ["string", "int64", "string", "double"]
    )
    assert np.isnan(ClipTable.open(made).fps[3])


def test_shards_of_shards_are_the_same(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "clips.parquet")
    once = make_shards(source, tmp_path / "once.shards").folder
    twice = make_shards(once, tmp_path / "far" / "twice.shards").folder
    columns = ("text", "text_short")
    assert_same(ClipTable.open(source, captions=columns), ClipTable.open(twice, captions=columns))


def test_relative_paths_lead_to_the_same_files_wherever_the_shards_lie(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "set" / "clips.parquet")
    made = make_shards(source, tmp_path / "fast" / "disk" / "clips.shards").folder
    table = ClipTable.open(made)
    assert Path(table.location(1)).resolve() == (tmp_path / "set" / "v" / "001 ✓.mp4").resolve()
    assert ClipTable.open(made, root=tmp_path).written_path(1) == "../../set/v/001 ✓.mp4"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "clips.csv")

    def interrupt(done: int) -> None:
        if done > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shards(source, tmp_path / "clips.shards", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["clips.csv"]


def test_the_index_is_what_makes_a_folder_of_shards(tmp_path: Path) -> None:
    made = make_shards(write(clips(), tmp_path / "clips.csv"), tmp_path / "clips.shards").folder
    (made / "index.json").rename(tmp_path / "index.json")
    with pytest.raises(UserError, match="is a folder"):
        ClipTable.open(made)


def test_shards_replace_shards_and_nothing_else(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "clips.csv")
    made = make_shards(source, tmp_path / "clips.shards").folder
    write(clips(50), source)
    assert make_shards(source, made).rows == len(ClipTable.open(made)) == 50
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    with pytest.raises(UserError, match="is not a folder of shards"):
        make_shards(source, tmp_path / "videos")
    assert (tmp_path / "videos" / "a.mp4").exists()


def test_every_file_of_shards_says_its_version(tmp_path: Path) -> None:
    made = make_shards(write(clips(), tmp_path / "clips.parquet"), tmp_path / "clips.shards").folder
    assert json.loads((made / "index.json").read_text())["version"] == 1
    files = list(made.glob("*.arrow"))
    assert len(files) >= 4, "100 rows in files of 32"
    for file in files:
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_file(mapped) as reader:
            assert reader.schema.metadata[b"longtake_format_version"] == b"1", file.name


def test_a_newer_format_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    made = make_shards(write(clips(), tmp_path / "clips.csv"), tmp_path / "clips.shards").folder
    index = json.loads((made / "index.json").read_text())
    (made / "index.json").write_text(json.dumps(index | {"version": 9}))
    with pytest.raises(UserError, match="has format version 9, and this Longtake reads up to version 1"):
        ClipTable.open(made)
    metadata = {"longtake_format": "clip table", "longtake_format_version": "12"}
    for name in ("new.parquet", "new.arrow"):
        newer = write(clips().replace_schema_metadata(metadata), tmp_path / name)
        for read in (ClipTable.open, lambda path: make_shards(path, tmp_path / "new.shards")):
            with pytest.raises(UserError, match="has format version 12, and this Longtake reads up to version 1"):
                read(newer)


def test_a_file_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    made = make_shards(write(clips(), tmp_path / "clips.csv"), tmp_path / "clips.shards").folder
    os.truncate(made / "height.npy", 200)
    with pytest.raises(UserError, match=r"height.npy has 200 bytes instead of 928"):
        ClipTable.open(made)
    (made / "00001.arrow").unlink()
    (made / "height.npy").unlink()
    with pytest.raises(UserError, match=r"00001.arrow is missing"):
        ClipTable.open(made)


def test_a_pickled_table_carries_names_and_opens_the_maps_again(tmp_path: Path) -> None:
    made = make_shards(write(clips(), tmp_path / "clips.csv"), tmp_path / "clips.shards").folder
    table = ClipTable.open(made, captions=("text", "text_short"))
    data = pickle.dumps(table)
    assert len(data) < 1000
    assert_same(table, pickle.loads(data))


def test_a_table_is_not_opened_again_over_other_shards(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "clips.csv")
    made = make_shards(source, tmp_path / "clips.shards").folder
    table = ClipTable.open(made)
    data = pickle.dumps(table)
    make_shards(write(clips(99), source), made)
    assert table.caption(98).startswith("take 98"), "what is open stays readable"
    with pytest.raises(UserError, match="has been replaced by other shards since the run began"):
        pickle.loads(data)


def test_texts_are_read_at_their_place(tmp_path: Path) -> None:
    opened = TableShards(make_shards(write(clips(), tmp_path / "clips.parquet"), tmp_path / "clips.shards").folder)
    opened.open_texts(["text_short", "text"])
    assert [opened.text("text_short", row) for row in range(100)] == [f"short {row}" for row in range(100)]
    assert opened.text("text_short", -1) == "short 99"
    assert [opened.text("text", row) for row in range(100)] == [text or "" for text in clips()["text"].to_pylist()]


def test_numbers_are_maps_that_nobody_can_write(tmp_path: Path) -> None:
    table = ClipTable.open(make_shards(write(clips(), tmp_path / "clips.csv"), tmp_path / "clips.shards").folder)
    for name in ARRAYS:
        assert not getattr(table, name).flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 1


def test_a_table_that_training_would_refuse_is_refused(tmp_path: Path) -> None:
    def refused(columns: pa.Table, said: str) -> None:
        with pytest.raises(UserError, match=said):
            make_shards(write(columns, tmp_path / "bad.parquet"), tmp_path / "bad.shards")
        assert not (tmp_path / "bad.shards").exists()

    refused(clips().drop_columns(["fps"]), "column fps is missing")
    refused(clips().slice(0, 0), "the table has no rows")
    refused(clips().append_column("clip_id", pa.array([*range(90), *range(10)], pa.uint64())), "rows 0 and 90 have the")
    ids = pa.array(["x" if row == 66 else str(row) for row in range(100)])
    refused(clips().append_column("clip_id", ids), "clip_id of row 66 is 'x'")


def test_ids_of_the_table_are_kept(tmp_path: Path) -> None:
    ids = pa.array(np.arange(100, dtype=np.uint64) + np.uint64(2**63))
    source = write(clips().append_column("clip_id", ids), tmp_path / "clips.csv")
    made = make_shards(source, tmp_path / "clips.shards").folder
    np.testing.assert_array_equal(ClipTable.open(made).clip_ids, ids.to_numpy())
    shutil.rmtree(made)


def test_a_caption_column_of_numbers_is_refused_as_in_any_table(tmp_path: Path) -> None:
    source = write(clips(), tmp_path / "clips.parquet")
    made = make_shards(source, tmp_path / "clips.shards").folder
    for table in (source, made):
        with pytest.raises(UserError, match="column score_aes holds double; it must hold text"):
            ClipTable.open(table, captions=("score_aes",))
