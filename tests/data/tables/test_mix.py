from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from longtake.contracts import Bucket, Slot, UserError
from longtake.data.config import DatasetConfig
from longtake.data.loading.draws import caption_columns
from longtake.data.tables import ids, mix
from longtake.data.tables.mix import JoinedColumn, MixedTable, open_clips
from longtake.data.tables.table import ClipTable


def table(folder: Path, paths: list[str], **columns: list) -> Path:
    folder.mkdir(exist_ok=True)
    numbers = {name: [value] * len(paths) for name, value in (("num_frames", 9), ("height", 48), ("width", 64))}
    content = {
        "path": paths,
        "text": [f"{folder.name} {path}" for path in paths],
        **numbers,
        "fps": [24.0] * len(paths),
    }
    pyarrow.parquet.write_table(pa.table(content | columns), folder / "clips.parquet")
    return folder / "clips.parquet"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two tables that share the written path of one clip."""
    return table(tmp_path / "films", ["a.mp4", "b.mp4", "c.mp4"]), table(tmp_path / "photos", ["b.mp4", "d.png"])


def mixed(pair: tuple[Path, Path], *weights: float) -> MixedTable:
    return MixedTable([ClipTable.open(path) for path in pair], weights)


def test_rows_run_through_the_tables_each_with_its_own_root_and_weight(pair: tuple[Path, Path]) -> None:
    both = mixed(pair, 1.0, 0.25)
    assert len(both) == 5
    assert both.location(2) == str(pair[0].parent / "c.mp4")
    assert both.location(3) == str(pair[1].parent / "b.mp4")
    assert both.caption(4) == "photos d.png"
    assert both.written_path(3) == "b.mp4"
    assert both.weights.tolist() == [1, 1, 1, 0.25, 0.25]
    with pytest.raises(IndexError):
        both.location(5)


def test_a_clip_keeps_its_id_whatever_tables_come_behind_it(pair: tuple[Path, Path]) -> None:
    films, photos = (ClipTable.open(path) for path in pair)
    both = MixedTable([films, photos], [1, 1])
    np.testing.assert_array_equal(both.clip_ids[:3], films.clip_ids)
    assert both.clip_ids[4] == photos.clip_ids[1]
    assert films.clip_ids[1] == photos.clip_ids[0] != both.clip_ids[3]  # the same path twice: two clips
    thrice = MixedTable([films, photos, films], [1, 1, 1])
    assert len(set(thrice.clip_ids.tolist())) == 8
    np.testing.assert_array_equal(thrice.clip_ids[:5], both.clip_ids)


def test_repeats_among_large_tables_are_searched_once(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, searches = mixed(pair, 1, 1).clip_ids, []
    monkeypatch.setattr(mix, "WORTH_KEEPING", 5)
    searched = ids.repeats
    monkeypatch.setattr(ids, "repeats", lambda found: searches.append(len(found)) or searched(found))
    for _ in range(2):
        np.testing.assert_array_equal(mixed(pair, 1, 1).clip_ids, expected)
    assert searches.count(5) == 1
    (kept,) = pair[0].parent.glob(".clips.parquet.*.repeats.npz")
    kept.write_bytes(kept.read_bytes()[:-40])  # damaged: searched again, and kept again
    for _ in range(2):
        np.testing.assert_array_equal(mixed(pair, 1, 1).clip_ids, expected)
    assert searches.count(5) == 2
    pair[1].write_bytes(table(pair[0].parent.parent / "other", ["e.png"]).read_bytes())
    assert len(mixed(pair, 1, 1).clip_ids) == 4  # with another table the file makes way
    assert len([*pair[0].parent.glob(".clips.parquet.*.repeats.npz")]) == 1
    assert len(set(mixed(pair[::-1], 1, 1).clip_ids.tolist())) == 4
    assert searches.count(5) == 2


def test_the_fingerprint_tells_tables_and_their_order_but_not_weights(pair: tuple[Path, Path]) -> None:
    assert mixed(pair, 1, 1).fingerprint == mixed(pair, 2, 0.5).fingerprint
    assert mixed(pair, 1, 1).fingerprint != mixed(pair[::-1], 1, 1).fingerprint


def test_a_mix_travels_to_a_worker_by_the_names_of_its_files(pair: tuple[Path, Path]) -> None:
    both = mixed(pair, 1, 0.5)
    sent = pickle.loads(pickle.dumps(both))
    assert (sent.fingerprint, sent.caption(3)) == (both.fingerprint, both.caption(3))
    assert len(pickle.dumps(both)) < 1000


def test_rows_that_make_no_sense_are_told_by_their_number_in_the_mix(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    bad = table(tmp_path / "bad", ["x.mp4", "y.mp4"], fps=[24.0, -1.0])
    assert list(mixed((pair[0], bad), 1, 1).invalid) == [4]


def test_a_run_opens_one_table_or_a_mix(pair: tuple[Path, Path]) -> None:
    one = open_clips(DatasetConfig(data_path=str(pair[0])))
    assert (len(one), one.weights) == (3, 1.0)
    both = open_clips(DatasetConfig(mix=[(str(pair[0]), 1.0), (str(pair[1]), 3.0)]))
    assert both.weights.tolist() == [1, 1, 1, 3, 3]
    with pytest.raises(UserError, match="no such file"):
        open_clips(DatasetConfig(mix=[(str(pair[0]), 1.0), ("gone.parquet", 3.0)]))
    with pytest.raises(UserError, match="has no column short"):
        open_clips(DatasetConfig(data_path=str(pair[0]), captions={"short": 1.0}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "neither is given"),
        ({"data_path": "a.csv", "mix": [("a.csv", 1.0)]}, "both are given"),
        ({"mix": []}, "at least 1"),
        ({"mix": [("a.csv", -1.0)]}, r"mix\.0\.1\n.* greater than or equal to 0"),
        ({"mix": [("a.csv", 0.0)]}, "every weight is 0"),
        ({"data_path": "a.csv", "captions": {"text": -0.5}}, r"captions\.text\n.* greater than or equal to 0"),
        ({"data_path": "a.csv", "captions": {"text": 0.0}}, "must be above 0"),
        ({"data_path": "a.csv", "cost": (0.0, 0.0, 0.0)}, "must be above 0"),
    ],
)
def test_a_mistake_in_mix_captions_or_cost_is_answered_with_a_sentence(settings: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DatasetConfig(**settings)


def slot(samples: int, pass_index: int = 0) -> Slot:
    ids = np.arange(samples, dtype=np.uint64)
    bucket = Bucket("32px", 1, "1:1", (1, 32, 32), samples)
    return Slot(bucket, pass_index, ids.astype(np.int64), ids, ids, np.ones(samples, np.float32))


def first_columns(pass_index: int, views: int = 0) -> list[str]:
    drawn = caption_columns(slot(4000, pass_index), {"long": 3.0, "short": 1.0, "never": 0.0}, 1, 0, views)
    assert all(sorted(columns) == ["long", "never", "short"] for columns in drawn)
    return [columns[0] for columns in drawn]


def test_caption_columns_come_up_with_their_probabilities_and_anew_in_each_view() -> None:
    counts = Counter(first_columns(0))
    assert counts["long"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert set(counts) == {"long", "short"}
    assert first_columns(0) == first_columns(0)
    assert first_columns(0) != first_columns(1)
    assert first_columns(0, views=2) == first_columns(2, views=2)
    assert caption_columns(slot(2), None, 0, 0) == [("text",)] * 2


def test_a_joined_column_reads_like_one_array() -> None:
    parts = [np.arange(5), np.arange(5, 5), np.arange(5, 12)]
    column, whole = JoinedColumn(parts), np.arange(12)
    assert len(column) == 12
    assert [column[row] for row in range(-12, 12)] == [whole[row] for row in range(-12, 12)]
    for start in range(13):
        for stop in range(13):
            np.testing.assert_array_equal(column[start:stop], whole[start:stop])
    np.testing.assert_array_equal(column[::-3], whole[::-3])
    rows = np.array([[11, 0], [4, 5]])
    np.testing.assert_array_equal(column[rows], whole[rows])
    np.testing.assert_array_equal(column[whole % 2 == 0], whole[::2])
    np.testing.assert_array_equal(np.asarray(column, np.float64), whole)
    with pytest.raises(IndexError):
        column[12]


def test_a_table_of_a_mix_may_lack_a_caption_column_but_not_all_of_them(pair: tuple[Path, Path]) -> None:
    table(pair[0].parent, ["a.mp4", "b.mp4", "c.mp4"], short=["s"] * 3)
    mix = [(str(path), 1.0) for path in pair]
    both = open_clips(DatasetConfig(mix=mix, captions={"short": 1.0, "text": 1.0}))
    assert [both.caption(row, "short") for row in range(5)] == ["s", "s", "s", "", ""]
    assert both.caption(4, "text") == "photos d.png"
    with pytest.raises(UserError, match=r"no table of dataset\.mix has a column title"):
        open_clips(DatasetConfig(mix=mix, captions={"title": 1.0}))
