"""Tables made from tables: filter, merge, split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.tables import convert, shards, write_rows
from longtake.data.tables.convert import make_shards
from longtake.data.tables.rows import open_rows
from longtake.data.tables.select import filter_table, merge_tables, split_table
from longtake.data.tables.table import ClipTable
from tests.data.tables.test_shards import clips, write


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", 7)
    monkeypatch.setattr(convert, "ROWS_PER_FILE", 28)
    monkeypatch.setattr(write_rows, "PARQUET_ROWS", 9)


def good(count: int = 100) -> pa.Table:
    """Clips without rows that make no sense; every third has no score."""
    table = clips(count).set_column(2, "num_frames", pa.array(range(1, count + 1)))
    scores = [None if row % 3 == 1 else row / 10 for row in range(count)]
    return table.set_column(table.column_names.index("score_aes"), "score_aes", pa.array(scores, pa.float64()))


def read(path: Path) -> pa.Table:
    return pa.Table.from_batches(open_rows(path).batches(), open_rows(path).schema)


@pytest.mark.parametrize("out", [".csv", ".parquet", ".arrow", ".json", ".jsonl"])
@pytest.mark.parametrize("into", [".csv", ".parquet", ".arrow", ".json", ".jsonl", ".shards"])
def test_a_filter_keeps_rows_in_order_with_their_ids_from_any_kind_to_any(tmp_path: Path, into: str, out: str) -> None:
    source = write(good(), tmp_path / f"clips{'.parquet' if into == '.shards' else into}")
    whole = ClipTable.open(source)
    if into == ".shards":
        source = make_shards(source, tmp_path / "clips.shards").folder
    target = tmp_path / "some" / f"kept{out}"
    done = filter_table(source, target, "resolution >= 65536 AND fps > 8 AND score_aes > 2")
    scores = np.array([np.nan if row % 3 == 1 else row / 10 for row in range(100)])
    with np.errstate(invalid="ignore"):
        mask = (whole.height * whole.width >= 65536) & (whole.fps > 8) & (scores > 2)
    kept = ClipTable.open(target)
    assert (done.kept, done.rows) == (mask.sum(), 100)
    assert 10 < done.kept < 70
    np.testing.assert_array_equal(kept.clip_ids, whole.clip_ids[mask])
    np.testing.assert_array_equal(kept.fps, whole.fps[mask])
    for new, old in enumerate(np.flatnonzero(mask).tolist()):
        assert kept.caption(new) == whole.caption(old)
        assert Path(kept.location(new)).resolve() == Path(whole.location(old)).resolve()


def test_empty_and_nan_cells_meet_no_condition(tmp_path: Path) -> None:
    table = good(4).set_column(5, "fps", pa.array([float("nan"), None, 5.0, 50.0]))
    source = write(table, tmp_path / "clips.parquet")
    assert filter_table(source, tmp_path / "a.parquet", "fps > 8").kept == 1
    assert filter_table(source, tmp_path / "b.parquet", "NOT fps > 8").kept == 1
    assert filter_table(source, tmp_path / "c.parquet", "fps IS NULL").kept == 2
    assert filter_table(source, tmp_path / "d.csv", "fps > 1000").kept == 0
    assert len(read(tmp_path / "d.csv")) == 0


def test_a_condition_may_use_what_other_columns_give_and_end_in_a_comment(tmp_path: Path) -> None:
    source = write(good(), tmp_path / "clips.csv")
    whole = ClipTable.open(source)
    done = filter_table(source, tmp_path / "a.csv", "aspect_ratio > 1 -- upright")
    assert done.kept == (whole.height > whole.width).sum()
    assert "aspect_ratio" not in open_rows(tmp_path / "a.csv").names


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("score_aesthetic > 5", r"(?s)score_aesthetic.*the columns of .*clips.csv are path, text, num_frames"),
        ("fps >", "the columns of .* are path"),
        ("fps > 'fast'", "fast.*the columns of"),
        ("fps > (SELECT max(fps) FROM clips)", "has a SELECT in it"),
        ("fps > 8) or (1=1", "syntax error.*write one condition such as"),
        ("fps > 8 ORDER BY fps", "syntax error"),
        ("fps > 8; DROP TABLE clips", 'syntax error at or near ";"'),
        ("true) -- ", "syntax error"),
        ("-- fps > 8", "syntax error"),
        ("*", "the columns of"),
        ("fps > ?", "the columns of"),
        ("", "--where is empty; write a condition such as .*; the columns of .* are path"),
        (" \t", "--where is empty"),
    ],
)
def test_a_condition_that_makes_no_sense_is_one_sentence(tmp_path: Path, where: str, said: str) -> None:
    source = write(good(), tmp_path / "clips.csv")
    with pytest.raises(UserError, match=said) as raised:
        filter_table(source, tmp_path / "out.parquet", where)
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clips.csv"]


def test_jsonl_damaged_line_costs_its_row(tmp_path: Path) -> None:
    (tmp_path / "clips.jsonl").write_text('{"path": "a.mp4"}\n{"path": \n')
    done = filter_table(tmp_path / "clips.jsonl", tmp_path / "out.csv", "true")
    assert (done.kept, done.left_out) == (1, {"rows: a cell cannot be read": 1})
    assert done.unreadable[0][2].startswith("line 2: not JSON")


def test_an_output_never_takes_the_place_of_its_source(tmp_path: Path) -> None:
    source = write(good(), tmp_path / "clips.csv")
    shards = make_shards(source, tmp_path / "clips.shards").folder
    with pytest.raises(UserError, match="would overwrite"):
        filter_table(source, source, "true")
    with pytest.raises(UserError, match="lies inside the shards"):
        filter_table(shards, shards / "out.csv", "true")
    assert filter_table(shards, shards / ".." / "out.csv", "true").target.exists()
    with pytest.raises(UserError, match="tables end in"):
        filter_table(source, tmp_path / "out.txt", "true")


def test_merged_tables_have_all_columns_and_lead_to_the_same_files(tmp_path: Path) -> None:
    one = write(good(20).drop_columns(["score_aes"]), tmp_path / "a" / "one.csv")
    words = pa.array([f"very {row}" for row in range(30)])
    two = good(30).drop_columns(["text_short"]).append_column("mood", words)
    paths = pa.array([f"w/{row}.mp4" for row in range(30)])
    two = write(two.set_column(0, "path", paths), tmp_path / "b" / "two.jsonl")
    done = merge_tables([one, two], tmp_path / "all.parquet")
    assert (done.kept, done.rows) == (50, 50)
    table = read(done.target)
    assert table["mood"].to_pylist() == [None] * 20 + words.to_pylist()
    assert table["text_short"].null_count == 30
    joined, first, second = (ClipTable.open(path) for path in (done.target, one, two))
    np.testing.assert_array_equal(joined.clip_ids, [*first.clip_ids, *second.clip_ids])
    assert Path(joined.location(3)).resolve() == Path(first.location(3)).resolve()
    assert Path(joined.location(23)).resolve() == Path(second.location(3)).resolve()


def test_kinds_that_differ_are_joined_to_one_that_holds_both(tmp_path: Path) -> None:
    base = pa.table({"path": ["a.mp4", "b.mp4"]})
    one = write(base.append_column("x", pa.array([1, 2])).append_column("y", pa.array([1, 2])), tmp_path / "1.parquet")
    base = pa.table({"path": ["c.mp4", "d.mp4"]})
    two = base.append_column("x", pa.array([0.5, None])).append_column("y", pa.array(["low", "high"]))
    done = merge_tables([one, write(two, tmp_path / "2.parquet")], tmp_path / "out.parquet")
    table = read(done.target)
    assert table["x"].to_pylist() == [1.0, 2.0, 0.5, None]
    assert table["y"].to_pylist() == ["1", "2", "low", "high"]
    lists = write(base.append_column("y", pa.array([[1], [2]])), tmp_path / "3.parquet")
    with pytest.raises(UserError, match=r"3.parquet: column y holds list<.*>, and int64 in .*1.parquet"):
        merge_tables([one, lists], tmp_path / "no.parquet")


def test_repeated_clips_are_refused_left_out_or_renamed(tmp_path: Path) -> None:
    one, two = (write(good(count), tmp_path / f"{count}.parquet") for count in (10, 12))
    with pytest.raises(
        UserError, match=r"row 0 of .*12.parquet: has the clip id \d+ of row 0 of .*10.parquet \(10 such"
    ):
        merge_tables([one, two], tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    first = merge_tables([one, two], tmp_path / "first.parquet", "first")
    assert (first.kept, first.rows) == (12, 22)
    assert ClipTable.open(first.target).clip_ids.tolist() == ClipTable.open(two).clip_ids.tolist()
    renamed = merge_tables([one, two], tmp_path / "renamed.parquet", "rename")
    ids = ClipTable.open(renamed.target).clip_ids
    assert renamed.kept == len(set(ids.tolist())) == 22
    assert ids[:10].tolist() == ClipTable.open(one).clip_ids.tolist()


def test_renamed_clips_have_the_ids_of_a_mix(tmp_path: Path) -> None:
    from longtake.data.tables.mix import MixedTable

    one, two = (write(good(count), tmp_path / f"{count}.parquet") for count in (10, 12))
    mixed = MixedTable([ClipTable.open(one), ClipTable.open(two)], [1, 1])
    renamed = merge_tables([one, two], tmp_path / "renamed.parquet", "rename")
    np.testing.assert_array_equal(ClipTable.open(renamed.target).clip_ids, mixed.clip_ids)


def test_a_split_loses_nothing_and_rows_added_later_move_no_others(tmp_path: Path) -> None:
    parts = [tmp_path / "train.parquet", tmp_path / "sub" / "val.csv"]
    source = write(good(400), tmp_path / "clips.parquet")
    done = split_table(source, parts, [0.75, 0.25])
    tables = [ClipTable.open(part) for part in parts]
    assert sum(each.kept for each in done) == 400
    assert 70 < done[1].kept < 130
    before = [set(table.clip_ids.tolist()) for table in tables]
    assert not before[0] & before[1]
    assert before[0] | before[1] == set(ClipTable.open(source).clip_ids.tolist())
    split_table(write(good(500), source), parts, [0.75, 0.25])
    after = [set(ClipTable.open(part).clip_ids.tolist()) for part in parts]
    assert before[0] <= after[0]
    assert before[1] <= after[1]
    assert Path(tables[1].location(0)).parent.resolve() == tmp_path / "v"


def test_a_split_by_a_column_keeps_equal_values_together(tmp_path: Path) -> None:
    source = write(good(400), tmp_path / "clips.parquet")
    parts = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    split_table(source, parts, [0.5, 0.5], by="path")
    paths = [set(read(part)["path"].to_pylist()) for part in parts]
    assert not paths[0] & paths[1]
    assert all(paths)
    first = read(parts[0])["path"].to_pylist()
    split_table(source, parts, [0.5, 0.5], by="path", seed=1)
    assert read(parts[0])["path"].to_pylist() != first


@pytest.mark.parametrize(
    ("fractions", "said"),
    [
        ([0.5], "1 for 2 outputs"),
        ([0.5, 0.4], "add up to 0.9"),
        ([1.5, -0.5], "must be above 0"),
        ([float("nan"), 0.5], "--fractions nan,0.5: they must be above 0"),
        ([float("inf"), 0.5], "--fractions inf,0.5: they must be above 0"),
    ],
)
def test_fractions_that_make_no_sense_are_refused(tmp_path: Path, fractions: list[float], said: str) -> None:
    source = write(good(), tmp_path / "clips.parquet")
    with pytest.raises(UserError, match=said):
        split_table(source, [tmp_path / "a.csv", tmp_path / "b.csv"], fractions)


def test_parquet_is_written_in_row_groups_that_stream(tmp_path: Path) -> None:
    target = filter_table(write(good(), tmp_path / "clips.csv"), tmp_path / "out.parquet", "true").target
    file = pyarrow.parquet.ParquetFile(target)
    assert max(file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)) <= 9
    assert file.schema_arrow.metadata[b"longtake_format_version"] == b"1"


@pytest.mark.parametrize("out", [".csv", ".parquet", ".arrow", ".json", ".jsonl"])
def test_columns_without_any_value_pass_through(tmp_path: Path, out: str) -> None:
    table = good(20).append_column("note", pa.nulls(20))
    source = write(table, tmp_path / "clips.parquet")
    assert filter_table(source, tmp_path / f"kept{out}", "num_frames > 5").kept == 15
    assert merge_tables([source], tmp_path / f"merged{out}").kept == 20
    assert split_table(source, [tmp_path / f"all{out}"], [1.0])[0].kept == 20
    numbers = good(20).append_column("note", pa.array(range(20))).set_column(0, "path", pa.array(map(str, range(20))))
    done = merge_tables([source, write(numbers, tmp_path / "more.parquet")], tmp_path / "both.parquet")
    assert read(done.target)["note"].to_pylist() == [None] * 20 + [*range(20)]
