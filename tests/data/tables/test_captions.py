"""Captions that are not where they are looked for are said to be missing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from longtake.contracts import UserError
from longtake.data.tables import shards
from longtake.data.tables.convert import make_shards
from longtake.data.tables.rows import open_rows
from longtake.data.tables.table import ClipTable, caption_lines, probe_warning
from tests.data.tables.test_shards import clips, write


def table_of(**texts: list[str | None]) -> pa.Table:
    """Five clips with these columns of texts."""
    table = clips(5).drop_columns(["text", "text_short"])
    for name, cells in texts.items():
        table = table.append_column(name, pa.array(cells, pa.string()))
    return table


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".shards"])
def test_clips_without_a_caption_are_counted_alike_in_every_kind_of_table(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", 2)
    texts = {"text": ["a", "", None, "d", None], "second": ["", "", "c", None, None], "third": [None] * 5}
    source = write(table_of(**texts), tmp_path / ("clips.parquet" if kind == ".shards" else f"clips{kind}"))
    if kind == ".shards":
        source = make_shards(source, tmp_path / "clips.shards").folder
    table = ClipTable.open(source, captions=("text", "second", "third"))
    assert table.count_empty(["text"]) == 3
    assert table.count_empty(["text", "second"]) == 2
    assert table.count_empty(["third"]) == table.count_empty([]) == 5
    for row, empty in enumerate([False, True, True, False, True]):
        assert (table.caption(row) == "") is empty


def test_the_line_before_the_first_step_names_what_else_might_hold_captions(tmp_path: Path) -> None:
    empty = table_of(text=[""] * 5, mood=["x"] * 5, type=["video"] * 5, caption=["a cat"] * 5)
    table = ClipTable.open(write(empty, tmp_path / "clips.parquet"), captions=("caption",))
    lines = caption_lines([table], {"caption": 1}).splitlines()
    assert lines[0] == "captions: column caption, empty for 0 of 5 clips"
    assert lines[1].startswith("warning: rows: 1 of 5 cannot be used; the first: row 4 of ")
    said = caption_lines([table], None)
    assert said.startswith("warning: captions: column text, empty for 5 of 5 clips (")
    assert "mood, caption)" in said
    assert "--dataset.captions.caption 1" in said


def test_tables_of_a_mix_are_counted_together(tmp_path: Path) -> None:
    one = ClipTable.open(write(table_of(text=["a"] * 5), tmp_path / "one.parquet"))
    two = table_of(text=[""] * 5, long=["b", None, "b", "b", "b"])
    two = ClipTable.open(write(two, tmp_path / "two.parquet"), captions=("long",))
    said = caption_lines([one, two], {"long": 1, "text": 1})
    assert said.startswith("warning: captions: column long, text, empty for 1 of 10 clips")
    assert caption_lines([one, two], {"long": 1}).startswith("warning: captions: column long, empty for 6 of 10")


def test_a_probe_says_which_columns_there_are_instead() -> None:
    path = pa.array(["a.mp4", "b.mp4"])
    said = probe_warning(pa.table({"path": path, "Caption": path}), "clips.csv")
    assert said is not None
    assert said.startswith("clips.csv: there is no column text (found path, Caption), so no clip has a caption; if ")
    assert said.endswith("rename it to text, or train with dataset.captions, such as --dataset.captions.Caption 1")
    assert probe_warning(pa.table({"path": path}), "c.csv").endswith(
        "add a column text if the model is to learn from captions"
    )
    half = pa.table({"path": path, "text": ["", "b"]})
    assert probe_warning(half, "c.csv") == "c.csv: text is empty for 1 of 2 clips (a.mp4)"
    assert probe_warning(pa.table({"path": path, "text": path}), "c.csv") is None


def test_blanks_around_the_names_of_a_csv_are_no_part_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", 1)
    source = tmp_path / "clips.csv"
    source.write_text("path, text ,num_frames,\theight,width, fps, clip_id\n1,007,9,32,48,24,5\n2,008,9,32,48,24,6\n")
    table = ClipTable.open(source)
    assert [table.caption(0), table.written_path(1)] == ["007", "2"]
    assert table.clip_ids.tolist() == [5, 6]
    found = open_rows(source)
    assert found.names == ["path", "text", "num_frames", "height", "width", "fps", "clip_id"]
    assert [batch.to_pylist() for batch in found.batches(["fps", "text"])] == [
        [{"fps": 24, "text": "007"}],
        [{"fps": 24, "text": "008"}],
    ]


@pytest.mark.parametrize("header", ["path,text,text", "path,text, text"])
def test_columns_that_share_a_name_are_one_sentence_everywhere(tmp_path: Path, header: str) -> None:
    source = tmp_path / "clips.csv"
    source.write_text(f"{header},num_frames,height,width,fps\na.mp4,a,b,9,32,48,24\n")
    said = "clips.csv: there are several columns text; names of columns must differ"
    for read in (ClipTable.open, open_rows, lambda path: make_shards(path, tmp_path / "shards")):
        with pytest.raises(UserError, match=said):
            read(source)
    assert [path.name for path in tmp_path.iterdir()] == ["clips.csv"]
