"""Malformed tables: a faulty row costs itself, with its line, in every reader, and never enters another row's cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.clips.caption_files import read_caption
from longtake.data.clips.captions import captions_in
from longtake.data.probing.probe import read_source
from longtake.data.tables import csv_table
from longtake.data.tables.captions import edit_captions
from longtake.data.tables.convert import make_shards
from longtake.data.tables.rows import open_rows, read_numbers
from longtake.data.tables.select import filter_table, merge_tables, split_table
from longtake.data.tables.stats import table_stats
from longtake.data.tables.table import ClipTable

NUMBERS = "9,32,48,8"
HEADER = "path,text,num_frames,height,width,fps"
CLIPS = "abcdefgh"

# rows by letter in place of sound ones -> the letters of the rows that are lost
CSV_FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "none": ({}, ""),
    "cell of two lines": ({"b": 'b.mp4,"big\ncat b, asleep",' + NUMBERS}, ""),
    "quote never closed": ({"a": 'a.mp4,"a 5"" screen,' + NUMBERS}, "a"),
    "quote never closed in the last row": ({"h": 'h.mp4,"big,' + NUMBERS}, "h"),
    "quote closed amid text": ({"b": 'b.mp4,"big cat,' + NUMBERS, "f": f'f.mp4,small" cat f,{NUMBERS}'}, "b"),
    "quote closed at the end of a cell": (
        {"b": 'b.mp4,"big cat,' + NUMBERS, "f": f'f.mp4,small cat f",{NUMBERS}'},
        "b",
    ),
    "quote closed by another row's": ({"b": f'b.mp4,"big cat,{NUMBERS}', "d": f'd.mp4,"cat d, big",{NUMBERS}'}, "b"),
    "quote of the path never closed": ({"c": f'"c.mp4,cat c,{NUMBERS}'}, "c"),
    "quote inside a quoted cell": ({"c": f'c.mp4,"a "big" cat c",{NUMBERS}'}, "c"),
    "quote inside a cell without quotes": ({"c": f'c.mp4,a "big" cat c,{NUMBERS}'}, ""),
    "backslash before a quote": ({"c": rf'c.mp4,"a \"big\" cat c",{NUMBERS}'}, "c"),
    "comma without quotes": ({"c": f"c.mp4,a big, grey cat c,{NUMBERS}"}, "c"),
    "too few cells": ({"c": "c.mp4", "e": "e.mp4,cat e"}, "ce"),
    "semicolons": ({"c": f"c.mp4;cat c;{NUMBERS.replace(',', ';')}"}, "c"),
    "bytes of another encoding": ({"c": f"c.mp4,caf\udce9 cat c,{NUMBERS}"}, "c"),
    "several": ({"a": "a.mp4", "c": 'c.mp4,"big', "d": "d.mp4;cat", "h": 'h.mp4,"'}, "acdh"),
}


def csv_of(fault: str, newline: str = "\n", end: bool = True, tail: str = "") -> tuple[bytes, dict[str, int]]:
    """A CSV with a fault, and the line of each clip."""
    changed = CSV_FAULTS[fault][0]
    lines, first_lines = [HEADER], {}
    for letter in CLIPS:
        first_lines[letter] = len("\n".join(lines).split("\n")) + 1
        lines.append(changed.get(letter, f"{letter}.mp4,cat {letter},{NUMBERS}"))
    text = "\n".join(lines) + ("\n" if end else "") + tail
    return text.replace("\n", newline).encode("utf-8", "surrogateescape"), first_lines


def used(table: ClipTable) -> dict[str, str]:
    """The letter of each clip that can be used -> its caption."""
    rows = [row for row in range(len(table)) if row not in table.invalid]
    return {table.written_path(row)[0]: table.caption(row) for row in rows}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_csv_faulty_row_costs_itself_with_its_line(tmp_path: Path, fault: str, newline: str) -> None:
    source = tmp_path / "clips.csv"
    for end, tail in ((True, ""), (False, ""), (True, "\n \n")):
        data, lines = csv_of(fault, newline, end, tail)
        source.write_bytes(data)
        table = ClipTable.open(source)
        lost = CSV_FAULTS[fault][1]
        assert sorted(used(table)) == [letter for letter in CLIPS if letter not in lost]
        assert all(f"cat {letter}" in caption and ".mp4" not in caption for letter, caption in used(table).items())
        named = [int(re.match(r"line (\d+): ", why)[1]) for why in table.invalid.values()]
        assert named == [lines[letter] for letter in lost]


@pytest.mark.parametrize("fault", ["quote closed at the end of a cell", "several"])
def test_csv_faulty_row_costs_itself_in_every_reader(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_table, "_ROWS", 3)
    source, lost = tmp_path / "clips.csv", CSV_FAULTS[fault][1]
    data, lines = csv_of(fault)
    source.write_bytes(data)
    good = [letter for letter in CLIPS if letter not in lost]
    assert sorted(used(ClipTable.open(make_shards(source, tmp_path / "clips.shards").folder))) == good
    outputs = [
        filter_table(source, tmp_path / "filtered.jsonl", "true"),
        merge_tables([source], tmp_path / "merged.parquet"),
        split_table(source, [tmp_path / "split.csv"], [1.0])[0],
    ]
    for done in outputs:
        assert sorted(used(ClipTable.open(done.target))) == good
        assert done.left_out == {"rows: a cell cannot be read": len(lost)}
        assert [table for table, _, _ in done.unreadable] == [source] * len(lost)
        assert [why.partition(": ")[0] for _, _, why in done.unreadable] == [f"line {lines[letter]}" for letter in lost]
    assert table_stats(source).invalid == {"cannot be read": len(lost)}
    assert (read_numbers(source)["num_frames"] == 9).sum() == len(good)
    columns, unreadable = read_source(source, as_text=False)
    assert len(columns) - len(unreadable) == len(good)
    with pytest.raises(UserError, match=f"line {lines[lost[0]]}: "):
        edit_captions(source, [lambda place, text: "x" + text])
    assert source.read_bytes() == data


def test_csv_lost_rows_of_two_tables_do_not_clash(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = csv_of("several")[0].decode().replace(".mp4", f".{name}.mp4")
        (tmp_path / f"{name}.csv").write_text(text)
        ids = [
            f"{line},clip_id" if not i else line + f",{len(name) * 100 + i + (name == 'two') * 50}"
            for i, line in enumerate(text.replace('"', "").splitlines())
        ]
        (tmp_path / f"{name}_ids.csv").write_text("\n".join(ids))
    for ending in (".csv", "_ids.csv"):
        done = merge_tables([tmp_path / f"{name}{ending}" for name in ("one", "two")], tmp_path / "all.parquet")
        assert done.kept == 8
        assert len(ClipTable.open(tmp_path / f"one{ending}")) == 8


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (f"{HEADER}\n".encode("utf-16"), "UTF-16"),
        (f"{HEADER}\n".encode("utf-16-le"), "UTF-16"),
        (f"sep=,\n{HEADER}\n".encode(), "sep=,"),
        (f"\ufeffsep=;\n{HEADER}\n".encode(), "sep=;"),
        (f"{HEADER}\n".replace(",", ";").encode(), "semicolons"),
        (f"{HEADER}\n".replace(",", "\t").encode(), "tabs"),
        (b'path,"text\na.mp4,x\n', "never closed"),
    ],
)
def test_csv_of_another_dialect_is_rejected_with_line_and_cause(tmp_path: Path, data: bytes, cause: str) -> None:
    source = tmp_path / "clips.csv"
    source.write_bytes(data)
    with pytest.raises(UserError, match=rf"clips.csv: line 1.*{cause}"):
        open_rows(source)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32"])
def test_jsonl_of_another_encoding_is_rejected_with_line(tmp_path: Path, encoding: str) -> None:
    source = tmp_path / "clips.jsonl"
    source.write_bytes('{"path": "a.mp4"}\n{"path": "b.mp4"}\n'.encode(encoding))
    with pytest.raises(UserError, match=r"clips\.jsonl: line 1.*UTF-(16|32)"):
        open_rows(source)


def test_csv_columns_without_names_are_rejected_with_their_numbers(tmp_path: Path) -> None:
    source = tmp_path / "clips.csv"
    source.write_text("path,text,,\na.mp4,x,,\n")
    with pytest.raises(UserError, match=r"clips\.csv: columns 3, 4 have no name"):
        open_rows(source)


def test_csv_readers_agree_on_every_sound_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of faulty files gives what DuckDB gives for a sound one."""
    source = tmp_path / "a[1]*?.csv"
    cells = [
        "",
        " ",
        "x",
        " x ",
        '""',
        '"a, b"',
        '"a ""b"" c"',
        '"two\nlines"',
        'a "b"',
        ' "c, d" ',
        "#",
        "NULL",
        "é猫",
    ]
    rows = [f"{a},{b},{a}\n" for a in cells for b in cells if (a + b).strip()]
    source.write_text("path,text,more\n" + "".join(rows) + "a,b,c,\n")
    both = []
    for _ in range(2):
        rows = open_rows(source, as_text=True)
        both.append((rows.lines.tolist(), pa.Table.from_batches(rows.batches()).to_pylist()))
        monkeypatch.setattr(csv_table, "_sound_lines", lambda *_: None)
    assert both[0] == both[1]
    assert len(both[0][0]) > 160


VALUES: dict[str, tuple[Any, str | None]] = {  # value of a column of captions -> the caption; None: its row is lost
    "a text": ("red cat", "red cat"),
    "null": (None, ""),
    "NaN": (float("nan"), ""),
    "infinity": (float("inf"), ""),
    "number": (7, "7"),
    "list of texts": (["one", "two"], '["one", "two"]'),
    "empty list": ([], ""),
    "true": (True, None),
    "false": (False, None),
    "object": ({"long": "x"}, None),
    "list of numbers": ([1, 2], None),
    "list with null": (["one", None], None),
    "list of lists": ([["one"]], None),
}


def json_text(rows: list[Any], suffix: str) -> str:
    return json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)


def parquet_of(source: Path, folder: Path) -> Path:
    filter_table(source, folder / "kept.parquet", "num_frames > 0")
    return folder / "kept.parquet"


CONVERTERS: dict[str, Callable[[Path, Path], Path]] = {
    "shards": lambda source, folder: make_shards(source, folder / "made.shards").folder,
    "Parquet": parquet_of,
    "shards of Parquet": lambda source, folder: make_shards(parquet_of(source, folder), folder / "made.shards").folder,
}


@pytest.mark.parametrize("values", [[["one"], {"long": "x"}], [{"long": "x"}, None], [True, False], [True, 5], [[1]]])
@pytest.mark.parametrize("converter", CONVERTERS)
def test_caption_column_without_a_text_costs_its_rows_after_conversion(
    tmp_path: Path, converter: str, values: list[Any]
) -> None:
    """Nothing in such a table says which column holds captions before a run names it."""
    numbers = {"num_frames": 9, "height": 32, "width": 48, "fps": 8}
    rows = [{"path": f"{i}.mp4", "text": "cat", "short": value, **numbers} for i, value in enumerate(values)]
    source = tmp_path / "clips.jsonl"
    source.write_text(json_text(rows, ".jsonl"))
    direct = ClipTable.open(source, captions=("text", "short"))
    table = ClipTable.open(CONVERTERS[converter](source, tmp_path), captions=("text", "short"))
    assert set(table.invalid) == set(direct.invalid)
    captions = [[each.caption(row, "short") for row in range(len(rows))] for each in (table, direct)]
    assert captions[0] == captions[1]
    assert table.num_frames.tolist() == direct.num_frames.tolist()
    assert table.fingerprint == direct.fingerprint


@pytest.mark.parametrize("values", [[["one"], {"long": "x"}], [5, True], ["cat", False]])
def test_merge_of_values_with_texts_leaves_out_rows_that_are_not_one_text(tmp_path: Path, values: list[Any]) -> None:
    numbers = {"num_frames": 9, "height": 32, "width": 48, "fps": 8}
    sources = []
    for name, cells in (("one", values), ("two", ["cat"]), ("three", [True])):
        rows = [{"path": f"{name}{i}.mp4", "short": value, **numbers} for i, value in enumerate(cells)]
        sources.append(tmp_path / f"{name}.jsonl")
        sources[-1].write_text(json_text(rows, ".jsonl"))
    done = merge_tables(sources, tmp_path / "merged.parquet")
    assert pa.parquet.read_table(done.target, columns=["path"])["path"].to_pylist() == ["one0.mp4", "two0.mp4"]
    assert [(source.stem, row) for source, row, _ in done.unreadable] == [("one", 1), ("three", 0)]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet", ".shards"])
def test_control_characters_of_captions_become_blanks_and_nul_costs_its_row(tmp_path: Path, suffix: str) -> None:
    texts = ["a\0b", "a\x07b\x1fc\x85d", "a\tb\nc"]
    columns = pa.table(
        {"path": ["0.mp4", "1.mp4", "2.mp4"], "text": texts}
        | {name: [number] * 3 for name, number in (("num_frames", 9), ("height", 32), ("width", 48), ("fps", 8))}
    )
    source = tmp_path / f"clips{'.parquet' if suffix == '.shards' else suffix}"
    if suffix == ".csv":
        pa.csv.write_csv(columns, source)
    elif suffix.startswith(".json"):
        source.write_text(json_text(columns.to_pylist(), suffix))
    else:
        pa.parquet.write_table(columns, source)
    table = ClipTable.open(make_shards(source, tmp_path / "clips.shards").folder if suffix == ".shards" else source)
    assert [*table.invalid] == [0]
    assert "NUL" in table.invalid[0]
    assert [table.caption(row) for row in range(3)] == ["", "a b c d", "a\tb\nc"]


def test_control_characters_in_a_caption_file_become_blanks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\x07b\x7fc\n", newline="")
    assert read_caption(tmp_path / "a.txt") == "a b c"
    assert captions_in('["a\\u0007b"]') == ("a b",)


@pytest.mark.parametrize("column", ["text", "short"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_value_that_is_not_one_text_is_empty_or_costs_its_row(tmp_path: Path, suffix: str, column: str) -> None:
    numbers = {"num_frames": 9, "height": 32, "width": 48, "fps": 8}
    rows = [
        {"path": f"{i}.mp4", "text": "cat", "short": "cat", **numbers} | {column: value}
        for i, (value, _) in enumerate(VALUES.values())
    ]
    source = tmp_path / f"clips{suffix}"
    source.write_text(json_text(rows, suffix))
    for table in (
        ClipTable.open(source, captions=("text", "short")),
        ClipTable.open(source, captions=("text", "short"), memory_efficient=True),
    ):
        captions = {
            name: None if row in table.invalid else table.caption(row, column) for row, name in enumerate(VALUES)
        }
        assert captions == {name: caption for name, (_, caption) in VALUES.items()}
        assert all(column in why for why in table.invalid.values())
        assert suffix == ".json" or all(why.startswith(f"line {row + 1}: ") for row, why in table.invalid.items())
    assert table.count_empty([column]) >= 4


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "7",
        "null",
        '{"path": "x.mp4"',
        '{"path": "x.mp4"} {}',
        "\x00",
        '{"path": "b.mp4", "text": "a", "text": "b"}',
    ],
)
def test_jsonl_line_that_is_not_an_object_costs_its_row(tmp_path: Path, line: str) -> None:
    row = {"path": "a.mp4", "text": "cat", "num_frames": 9, "height": 32, "width": 48, "fps": 8}
    source = tmp_path / "clips.jsonl"
    source.write_text(f"{json.dumps(row)}\n\n{line}\n{json.dumps(row | {'path': 'b.mp4'})}\n")
    table = ClipTable.open(source)
    assert used(table) == {"a": "cat", "b": "cat"}
    assert [*table.invalid] == [1]
    assert table.invalid[1].startswith("line 3: ")
    source.write_text(f"{line}\n")
    with pytest.raises(UserError, match="line 1: "):
        open_rows(source)


@pytest.mark.parametrize("values", [[{"a": 1}, [1]], [True, False], [{"a": 1}, {"a": 2}]])
def test_json_captions_without_one_text_cost_their_rows(tmp_path: Path, values: list[Any]) -> None:
    numbers = {"num_frames": 9, "height": 32, "width": 48, "fps": 8}
    source = tmp_path / "clips.jsonl"
    rows = [{"path": f"{i}.mp4", "text": "cat", "short": value, **numbers} for i, value in enumerate([*values, 7])]
    source.write_text(json_text(rows, ".jsonl"))
    table = ClipTable.open(source, captions=("text", "short"))
    assert [*table.invalid] == [0, 1]
    assert table.caption(2, "short") == "7"


def test_json_columns_without_texts_never_end_a_table(tmp_path: Path) -> None:
    """Values of several kinds in a column without texts are kept as JSON; in a column of numbers they cost rows."""
    odd = [[1], ["a"], {"x": 1}, 2, True, 2**70, [{"y": None}], None]
    row = {"path": "a.mp4", "text": "cat", "num_frames": 9, "height": 32, "width": 48, "fps": 8}
    source = tmp_path / "clips.jsonl"
    source.write_text("".join(json.dumps(row | {"odd": value}) + "\n" for value in odd))
    cells = pa.Table.from_batches(open_rows(source).batches())["odd"].to_pylist()
    assert [None if cell is None else json.loads(cell) for cell in cells] == odd
    source.write_text("".join(json.dumps(row | {"height": value}) + "\n" for value in [32, *odd]))
    assert sorted(ClipTable.open(source).invalid) == [1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("write", [pyarrow.parquet.write_table, pa.feather.write_feather])
def test_parquet_captions_that_are_lists_or_nan_become_texts(tmp_path: Path, write: Callable[..., None]) -> None:
    source = tmp_path / ("clips.parquet" if write is pyarrow.parquet.write_table else "clips.arrow")
    numbers = {name: [value] * 3 for name, value in (("num_frames", 9), ("height", 32), ("width", 48), ("fps", 8.0))}
    lists = pa.array([["one", "two"], [], None], pa.list_(pa.string()))
    missing = pa.array([float("nan"), None, float("nan")], pa.float64())
    kwargs = {} if source.suffix == ".parquet" else {"compression": "uncompressed"}
    for text, other in ((lists, missing), (missing, lists)):
        write(
            pa.table({"path": ["a.mp4", "b.mp4", "c.mp4"], "text": text, "short": other, **numbers}), source, **kwargs
        )
        table = ClipTable.open(source, captions=("text", "short"))
        texts = [[table.caption(row, name) for row in range(3)] for name in ("text", "short")]
        assert sorted(texts, reverse=True) == [['["one", "two"]', "", ""], ["", "", ""]]
        assert table.invalid == {}
