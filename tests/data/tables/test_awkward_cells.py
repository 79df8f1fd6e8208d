"""A file means the same however large it is, and a cell that cannot be read costs its row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.probing.probe import probe_table
from longtake.data.tables import convert, json_table, shards
from longtake.data.tables.convert import make_shards
from longtake.data.tables.rows import open_rows
from longtake.data.tables.select import filter_table, merge_tables, split_table
from longtake.data.tables.stats import table_stats
from longtake.data.tables.table import ClipTable, caption_lines
from longtake.data.tables.write_rows import write_table
from tests.data.tables.test_shards import assert_same

LINES = [  # path, text, num_frames, height, width, fps, score_vmafmotion, then what no run reads
    "a.mp4,a cat,33,48,64,24,1,7,true,1,2020-01-01,",
    'b.mp4,"two, ""quoted""\nlines",33,48,64,29.97,,8.5,false,NULL,2020-01-02,',
    "0042,007,33,48,64,,2.5,9,true,2,2020-01-03,",
    "NULL,nan,033, 48 ,64,NaN,nan,10,,,,",
    "e.mp4,,33,48,64.0,24,1,11,true,3,x,",
    "f.mp4,猫 ✓,33,1e2,64,24,1,0.5,true,0x10,x,",
    "a.mp4,again,33,48,64,24,1,12,true,1,x,",
    "h.mp4,1984,1,48,64,,1,13,true,1,x,",
]
NAMES = "path,text,num_frames,height,width,fps,score_vmafmotion,score,flag,name,day,empty"
BAD_LINES = [
    "i.mp4,x,33,tall,64,24,1,1,true,1,x,",
    "j.mp4,x,33,48,64,fast,1,1,true,1,x,",
    "k.mp4,x,33,48,64,24,low,1,true,1,x,",
    "l.mp4,x,0x10,48,64,24,1,1,true,1,x,",
    "m.mp4,x,2.5,48,64,24,1,1,true,1,x,",
    "n.mp4,x,,48,64,24,1,1,true,1,x,",
    ",x,33,48,64,24,1,1,true,1,x,",
    "o\0.mp4,x,33,48,64,24,1,1,true,1,x,",
]
BAD_BYTES = b"p.mp4,caf\xe9,33,48,64,24,1,1,true,1,x,"
WHY = [
    "height is 'tall', expected a number",
    "fps is 'fast', expected a number",
    "score_vmafmotion is 'low', expected a number",
    "num_frames is '0x10', expected a number",
    "num_frames is 2.5, expected a whole number from 1",
    "num_frames is empty, expected a whole number from 1",
    "path is empty",
    "path holds a NUL byte",
    "text is not text in UTF-8 (unexpected end of data at byte 3)",
]
FIRST_BAD = len(LINES)
FIRST_LINE = FIRST_BAD + 3  # after the header, and a cell of two lines


def csv(bad: bool) -> bytes:
    lines = [NAMES, *LINES, *(BAD_LINES if bad else [])]
    return b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n" + (BAD_BYTES + b"\n" if bad else b"")


def objects(bad: bool) -> list[dict[str, Any]]:
    """Rows as JSON has them: keys that some lack, whole numbers before decimal ones, mixed kinds, no Unicode."""
    row = {"path": "a.mp4", "text": "a cat", "num_frames": 33, "height": 48, "width": 64, "fps": 24}
    out = [row, row | {"fps": 29.97, "score": 1, "mixed": 1}, {**row, "text": None, "fps": None, "mixed": 2.5}]
    out += [row | {"text": 1984, "fps": "24", "mixed": "x"}, row | {"num_frames": "33", "score": 0.5, "mixed": 1e9}]
    if bad:
        out += [row | {"height": "tall"}, row | {"num_frames": True}, row | {"width": 2**70}, row | {"text": "\ud800"}]
        out += [{name: cell for name, cell in row.items() if name != "height"}, row | {"num_frames": float("inf")}]
        out += [row | {"mixed": "a\udcff"}, row | {"path": "\ud800"}, row | {"mixed": True}]
    return out


def write(path: Path, bad: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        path.write_bytes(csv(bad))
    elif path.suffix == ".json":
        path.write_text(json.dumps(objects(bad)))
    elif path.suffix == ".jsonl":
        path.write_text("\ufeff" + "\n\n".join(map(json.dumps, objects(bad))))
    else:  # a Parquet or Arrow file whose numbers are text, and whose text need not be
        cells = [line.split(b",") for line in csv(bad).splitlines()[5:] if line.count(b",") == NAMES.count(",")]
        columns = [pa.array(column, pa.binary()).view(pa.string()) for column in zip(*cells, strict=True)]
        table = pa.table(columns, NAMES.split(","))
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=3)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("batch", [3, 1 << 16])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow", ".json", ".jsonl"])
def test_a_file_means_the_same_whichever_side_of_the_limit_it_lies_on(
    tmp_path: Path, suffix: str, bad: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", batch)
    monkeypatch.setattr(convert, "ROWS_PER_FILE", 2 * batch)
    monkeypatch.setattr(json_table, "_ROWS", 2)
    source = write(tmp_path / f"clips{suffix}", bad)
    small = ClipTable.open(source, memory_efficient=None)
    schema, cells = open_rows(source).schema, [*open_rows(source).batches()]
    monkeypatch.setattr(convert, "LARGE_BYTES", 10)
    large = ClipTable.open(source, memory_efficient=None)
    assert not large.clip_ids.flags.owndata, "it lies in shards"
    assert_same(small, large, captions=("text",))
    (folder,) = tmp_path.glob(".*.shards")
    for other in (open_rows(source), open_rows(folder)):
        assert other.schema.remove_metadata() == schema.remove_metadata() or other.source == folder
        found = pa.Table.from_batches(other.batches()).select(schema.names)
        assert found.equals(pa.Table.from_batches(cells))
    unreadable = [
        {row: why for chunk in open_rows(at).chunks() for row, why in chunk.unreadable.items()}
        for at in (source, folder)
    ]
    assert unreadable[0] == unreadable[1]
    assert bool(unreadable[0]) is bad
    assert unreadable[0].items() <= small.invalid.items()
    facts = [table_stats(at) for at in (source, folder)]
    assert facts[0].invalid == facts[1].invalid
    assert sum(facts[0].invalid.values()) == len(small.invalid)


def test_the_cells_of_a_csv_are_what_they_look_like(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path / "clips.csv", bad=False))
    assert [table.written_path(row) for row in range(4)] == ["a.mp4", "b.mp4", "0042", "NULL"]
    assert [table.caption(row) for row in range(8)] == [
        *("a cat", 'two, "quoted"\nlines', "007", "nan", "", "猫 ✓", "again", "1984")
    ]
    assert table.height.tolist() == [48, 48, 48, 48, 48, 100, 48, 48]
    np.testing.assert_array_equal(table.fps, [24, 29.97, np.nan, np.nan, 24, 24, 24, np.nan])
    assert table.invalid == {}
    schema = open_rows(table.source).schema
    kinds = {"score": "double", "flag": "string", "name": "string", "day": "string", "empty": "string"}
    assert {name: str(schema.field(name).type) for name in kinds} == kinds
    assert [str(schema.field(name).type) for name in ("num_frames", "height", "width", "fps")] == (
        ["int64", "double", "double", "double"]
    )


def test_a_cell_that_cannot_be_read_costs_its_row_with_its_place(tmp_path: Path) -> None:
    table = ClipTable.open(write(tmp_path / "clips.csv", bad=True))
    assert table.invalid == {FIRST_BAD + i: f"line {FIRST_LINE + i}: {why}" for i, why in enumerate(WHY)}
    assert table.num_frames.tolist() == [33] * 7 + [1] + [0] * len(WHY)
    said = caption_lines([table], None).splitlines()
    assert said[0].startswith("warning: captions: column text, empty for 2 of 17 clips")
    first = f"row {FIRST_BAD} of {table.source}: line {FIRST_LINE}: {WHY[0]}"
    assert f"9 of 17 cannot be used; the first: {first}; row {FIRST_BAD + 1} of " in said[1]


def test_text_among_the_numbers_of_json_costs_its_row_too(tmp_path: Path) -> None:
    for suffix in (".json", ".jsonl"):
        table = ClipTable.open(write(tmp_path / f"clips{suffix}", bad=True))
        bare = {row: re.sub(r"^line \d+: ", "", why) for row, why in table.invalid.items()}
        lines = [int(line) for why in table.invalid.values() for line in re.findall(r"^line (\d+): ", why)]
        assert lines == ([2 * row + 1 for row in table.invalid] if suffix == ".jsonl" else [])
        assert bare == {
            5: "height is 'tall', expected a number",
            6: "num_frames is 'true', expected a number",
            7: "width is 1.18059e+21, expected a whole number from 1",
            8: "text is not text in UTF-8 (invalid continuation byte at byte 0)",
            9: "height is empty, expected a whole number from 1",
            10: "num_frames is inf, expected a whole number from 1",
            11: "mixed is not text in UTF-8 (invalid continuation byte at byte 1)",
            12: "path is not text in UTF-8 (invalid continuation byte at byte 0)",
            13: "mixed is true, expected a text",
        }
        mixed = pa.Table.from_batches(open_rows(table.source).batches())["mixed"].to_pylist()
        assert mixed[:6] == [None, "1", "2.5", "x", "1000000000.0", None]


def test_what_is_made_of_a_table_leaves_out_the_rows_that_cannot_be_read(tmp_path: Path) -> None:
    """Their cells are empty: a rate that cannot be read must not come out as one that is unknown."""
    source = write(tmp_path / "clips.csv", bad=True)
    good = [row for row in range(FIRST_BAD + len(WHY)) if row not in (*range(FIRST_BAD, FIRST_BAD + 4), FIRST_BAD + 8)]
    ids = ClipTable.open(source).clip_ids[good].tolist()
    folder = make_shards(source, tmp_path / "clips.shards").folder
    for at in (source, folder):
        made = [
            filter_table(at, tmp_path / "filtered.parquet", "true"),
            merge_tables([at], tmp_path / "merged.parquet"),
            split_table(at, [tmp_path / "split.parquet"], [1.0])[0],
        ]
        for done in made:
            assert (done.kept, done.rows) == (len(ids), FIRST_BAD + len(WHY))
            assert done.left_out == {"rows: a cell cannot be read": 5}
            assert done.unreadable[0][1:] == (FIRST_BAD, f"line {FIRST_LINE}: {WHY[0]}")
            assert open_rows(done.target).ids().tolist() == ids


def test_a_probe_lists_the_rows_that_cannot_be_read_and_makes_the_numbers_anew(tmp_path: Path) -> None:
    source = write(tmp_path / "clips.csv", bad=True)
    with pytest.raises(UserError, match="no clip is usable, all 17 are listed"):
        probe_table(source, tmp_path / "out.parquet")
    bad = pa.csv.read_csv(tmp_path / "out.bad.csv")
    reasons = dict(zip(bad["row"].to_pylist(), bad["reason"].to_pylist(), strict=True))
    assert reasons[FIRST_BAD] == "no such file", "its height is measured, not read"
    assert reasons[FIRST_BAD + 8] == f"line {FIRST_LINE + 8}: {WHY[8]}"


def test_a_filter_says_which_rows_went_and_why(tmp_path: Path) -> None:
    lines = ["a.mp4,x,48,48,64,24", "b.mp4,x,24,48,64,24", "c.png,x,1,48,64,", "d.png,x,1,48,64,", "e.mp4,x,48,48,64,"]
    source = tmp_path / "clips.csv"
    source.write_text("path,text,num_frames,height,width,fps\n" + "\n".join([*lines, "f.mp4,x,33,48,64,fast"]) + "\n")
    done = filter_table(source, tmp_path / "out.csv", "duration >= 2 AND fps < 30")
    assert done.kept == 1
    assert done.left_out == {
        "rows: a cell cannot be read": 1,
        "videos: the condition is false": 1,
        "stills: fps and duration empty": 2,
        "videos: fps and duration empty": 1,
    }
    assert filter_table(source, tmp_path / "out.csv", "num_frames = 1 OR duration >= 2").kept == 3
    for several in ("row_number() OVER () < 3", "max(fps) > 3"):
        with pytest.raises(UserError, match="--where"):
            filter_table(source, tmp_path / "out.csv", several)


def flipped(data: bytes, seed: int) -> bytes:
    """Some bytes of a file changed, or its end cut off."""
    random, changed = Random(seed), bytearray(data)
    for _ in range(random.choice([1, 1, 3, 30])):
        place = random.randrange(len(changed))
        changed[place] = random.choice([random.randrange(256), 0, 255, changed[place] ^ 1])
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


def read_all(source: Path) -> None:
    """All that a run and the data verbs read of a table."""
    table = ClipTable.open(source)
    table.count_empty(["text"])
    for row in range(len(table)):
        table.caption(row), table.written_path(row)
    for chunk in open_rows(source).chunks():
        chunk.batch.to_pylist()


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".arrow", ".json", ".jsonl", ".shards"])
def test_a_damaged_table_is_one_sentence_or_reads_as_another(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", 8)
    monkeypatch.setattr(convert, "ROWS_PER_FILE", 16)
    row = {"num_frames": 9, "height": 64, "width": 48, "fps": 24.0, "tags": ["é", "x"], "kind": "k"}
    table = pa.Table.from_pylist([{"path": f"{n}.mp4", "text": f"a cat é {n}", **row} for n in range(20)])
    source = tmp_path / f"clips{'.arrow' if kind == '.shards' else kind}"
    write_table(table, source)
    files = [source] if kind != ".shards" else sorted(make_shards(source, tmp_path / "clips.shards").folder.iterdir())
    source = source if kind != ".shards" else tmp_path / "clips.shards"
    read_all(source)
    refused: list[str] = []
    for file in files:
        whole = file.read_bytes()
        for seed in range(max(6, 30 // len(files))):
            file.write_bytes(flipped(whole, seed))
            try:
                read_all(source)
            except UserError as error:
                refused.append(str(error))
        file.write_bytes(whole)
    assert refused
    assert not any("\n" in sentence for sentence in refused)
