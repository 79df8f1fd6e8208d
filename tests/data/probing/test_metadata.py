"""Lists with `file_path`, as other programs read them, as training sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtake.buckets.order import plan_pass
from longtake.contracts import UserError
from longtake.data.clips.video import write_image, write_video
from longtake.data.config import DatasetConfig
from longtake.data.probing.probe import probe_table
from longtake.data.tables.mix import clip_weights, open_clips, order_columns, table_and_root
from longtake.data.tables.select import filter_table, merge_tables, split_table
from longtake.data.tables.stats import table_facts, table_stats
from longtake.data.tables.table import ClipTable
from tests.buckets.tables import inputs, rule
from tests.data.made_clips import noise_frames


@pytest.fixture
def files(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    place.mkdir()
    write_video(place / "a.mp4", noise_frames(9, 32, 48), 8)
    write_video(place / "b.mp4", noise_frames(5, 48, 32), 24)
    write_image(place / "c.png", noise_frames(1, 16, 24)[0])
    return place


ROWS: list[dict[str, Any]] = [
    {"file_path": "b.mp4", "text": "tall", "type": "video", "width": "32", "height": 48, "control_file_path": "a.mp4"},
    {"file_path": "a.mp4", "text": "wide", "type": "video"},
    {"file_path": "c.png", "text": "a still", "width": 24, "height": 16},  # without a type: an image
    {"file_path": "a.mp4", "text": "the same again", "type": "video"},
]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "meta.json") -> Path:
    path = folder / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
        path.write_text("\n".join(lines))
    return path


def opened(meta: Path, files: Path, columns: tuple[str, ...] = ()) -> ClipTable:
    table = open_clips(DatasetConfig(data_path=str(meta), root=str(files)), columns)
    assert all(Path(table.location(row)).is_file() for row in range(len(table)))
    return table


def numbers(table: ClipTable) -> list[tuple]:
    return [
        (table.written_path(row), table.caption(row), *(int(column[row]) for column in columns), float(table.fps[row]))
        for columns in [(table.num_frames, table.height, table.width)]
        for row in range(len(table))
    ]


@pytest.mark.parametrize("name", ["meta.json", "meta.csv"])
def test_a_list_is_read_as_it_is_and_probed_once(
    name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = written(tmp_path, ROWS, name)
    table = opened(meta, files, ("control",))
    found = numbers(table)
    assert [row[:5] for row in found] == [
        ("b.mp4", "tall", 5, 48, 32),
        ("a.mp4", "wide", 9, 32, 48),
        ("c.png", "a still", 1, 16, 24),
        ("a.mp4", "the same again", 9, 32, 48),
    ]
    assert (found[0][5], found[1][5]) == (24, 8)
    assert [table.caption(row, "control") for row in range(4)] == ["a.mp4", "", "", ""]
    assert len(set(table.clip_ids.tolist())) == 4
    assert "probing 3 of 4 files, once, into" in capsys.readouterr().err, "the picture says its size"
    assert numbers(opened(meta, files, ("control",)))[:2] == found[:2]
    assert capsys.readouterr().err == ""
    assert (tmp_path / f".{name}.longtake.parquet").is_file()


def test_a_changed_row_or_file_is_looked_at_again(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(written(tmp_path, ROWS), files)
    write_video(files / "b.mp4", noise_frames(7, 32, 32), 24)
    table = opened(written(tmp_path, [*ROWS[:3], ROWS[3] | {"text": "another text"}]), files)
    assert (int(table.num_frames[0]), table.caption(3)) == (7, "another text")
    assert "probing 2 of 4 files" in capsys.readouterr().err.splitlines()[-1]


def test_numbers_that_are_said_are_not_probed_and_a_missing_file_is_listed(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"file_path": "a.mp4", "text": "", "num_frames": 400, "width": 1280, "height": 720}
    meta = written(tmp_path, [said, said | {"file_path": "gone.mp4"}])
    assert [row[2:5] for row in numbers(opened(meta, files))] == [(400, 720, 1280)]
    assert "1 files cannot be used, see" in capsys.readouterr().err
    with pytest.raises(UserError, match="none of its 1 videos and pictures can be used"):
        opened(written(tmp_path, [{"file_path": "gone.mp4", "text": ""}], "gone.json"), files)


def test_a_list_is_probed_into_a_table(files: Path, tmp_path: Path) -> None:
    probe_table(written(tmp_path, ROWS), tmp_path / "clips.parquet", root=files)
    table = open_clips(DatasetConfig(data_path=str(tmp_path / "clips.parquet")), ("control",))
    assert [table.caption(row) for row in range(4)] == [row["text"] for row in ROWS]
    assert [int(frames) for frames in table.num_frames] == [5, 9, 1, 9]


@pytest.mark.parametrize(("repeat", "videos"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_videos_are_repeated_and_stills_are_not(repeat: int, videos: int, files: Path, tmp_path: Path) -> None:
    table = opened(written(tmp_path, ROWS), files)
    config = DatasetConfig(data_path="unused", video_repeat=repeat)
    law = rule({"16px": {1: (1.0, 1), 5: (1.0, 1)}})
    made = inputs(0, rule=law, weights=clip_weights(config, table.num_frames), **order_columns(table))
    order = plan_pass(made, 0)
    rows = np.concatenate([slot.rows for step in range(order.num_steps) for slot in order.step(step)])
    assert np.bincount(rows).tolist() == [videos, videos, 1, videos]


def test_a_list_is_cut_filtered_and_joined_as_a_list(files: Path, tmp_path: Path) -> None:
    meta = written(files, ROWS)
    numbers_of = numbers(opened(meta, files, ("control",)))
    kept = tmp_path / "kept" / "meta.json"
    assert filter_table(meta, kept, "file_path LIKE '%.mp4' AND type = 'video'").kept == 3
    rows = json.loads(kept.read_text())
    assert [row["file_path"] for row in rows] == ["../files/b.mp4", "../files/a.mp4", "../files/a.mp4"]
    assert rows[0]["control_file_path"] == "../files/a.mp4"
    assert [row[1:-1] for row in numbers(opened(kept, kept.parent, ("control",)))] == [
        row[1:-1] for row in (numbers_of[0], numbers_of[1], numbers_of[3])
    ]
    parts = [tmp_path / "one.json", tmp_path / "two.csv"]
    split_table(meta, parts, [0.5, 0.5], by="file_path")
    assert merge_tables(parts, tmp_path / "all.jsonl").kept == 4
    assert sorted(row[1:-1] for row in numbers(opened(tmp_path / "all.jsonl", tmp_path))) == sorted(
        row[1:-1] for row in numbers_of
    )
    with pytest.raises(UserError, match=r"duration.*`longtake data probe .*meta\.json -o meta\.parquet` makes a table"):
        filter_table(meta, tmp_path / "x.json", "duration >= 2")


def test_numbers_of_a_list_are_of_its_own_columns(files: Path) -> None:
    table, _ = table_and_root(written(files, ROWS), files)
    assert not [name for name, _ in table_facts(table_stats(table)) if "changed" in name]


def test_a_probed_list_finds_its_control_videos_from_another_folder(files: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    probe_table(written(files, ROWS[:1]), tmp_path / "tables" / "clips.parquet")
    found = ClipTable.open(tmp_path / "tables" / "clips.parquet", captions=("control",))
    assert found.caption(0, "control") == "../files/a.mp4"
