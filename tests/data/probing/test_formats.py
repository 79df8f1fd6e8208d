"""CSV, Parquet, Arrow, JSON and JSONL, in and out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from longtake.contracts import UserError
from longtake.data.clips.video import write_image, write_video
from longtake.data.probing.probe import probe_table
from longtake.data.tables import json_table
from longtake.data.tables.rows import open_rows
from longtake.data.tables.write_rows import write_table
from tests.data.made_clips import noise_frames

SUFFIXES = (".csv", ".parquet", ".arrow", ".json", ".jsonl")
ROWS = [
    {"path": "a b ✓.mp4", "text": 'a "cat",\non two lines', "score": 3.5, "note": "0012"},
    {"path": "gone.mp4", "text": "lost", "score": 1.0, "note": ""},
    {"path": "c.png", "text": "", "score": 2.0, "note": "ü"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips, and `ROWS` in every format."""
    write_video(tmp_path / "a b ✓.mp4", noise_frames(12, 32, 48), 24)
    write_image(tmp_path / "c.png", noise_frames(1, 20, 30)[0])
    table = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with open(tmp_path / "in.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    (tmp_path / "in.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS), encoding="utf-8")
    return tmp_path


def _rows(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".arrow":
        return pa.ipc.open_file(path).read_all().to_pylist()
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("source", SUFFIXES)
@pytest.mark.parametrize("target", SUFFIXES)
def test_every_format_gives_every_format(source: str, target: str, folder: Path) -> None:
    probe_table(folder / f"in{source}", folder / f"out{target}")
    rows = _rows(folder / f"out{target}")
    assert [row["path"] for row in rows] == ["a b ✓.mp4", "c.png"]
    assert [row["text"] for row in rows] == ['a "cat",\non two lines', ""]
    assert [row["note"] for row in rows] == ["0012", "ü"]
    assert [float(row["score"]) for row in rows] == [3.5, 2.0]
    assert [int(row["num_frames"]) for row in rows] == [12, 1]
    assert [row["fps"] or None for row in rows] == (["24", None] if target == ".csv" else [24.0, None])
    assert [row["codec"] for row in rows] == ["h264", "png"]
    assert int(rows[0]["clip_id"]) > 2**32
    assert [float(row["duration"]) if row["duration"] else None for row in rows] == [0.5, None]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_probed_table_can_be_probed_again(suffix: str, folder: Path) -> None:
    probe_table(folder / "in.jsonl", folder / f"one{suffix}")
    result = probe_table(folder / f"one{suffix}", folder / "two.jsonl")
    assert result.bad == 0
    probe_table(folder / "in.jsonl", folder / "one.jsonl")
    assert _rows(folder / "two.jsonl") == _rows(folder / "one.jsonl")


def test_parquet_and_arrow_say_their_format_and_version(folder: Path) -> None:
    for suffix in (".parquet", ".arrow"):
        probe_table(folder / "in.csv", folder / f"out{suffix}")
    schemas = [pyarrow.parquet.read_schema(folder / "out.parquet"), pa.ipc.open_file(folder / "out.arrow").schema]
    for schema in schemas:
        assert schema.metadata[b"longtake_format"] == b"clip table"
        assert schema.metadata[b"longtake_format_version"] == b"1"


def test_lists_and_missing_keys_survive(folder: Path) -> None:
    rows = [{"path": "c.png", "tags": ["a", "b"]}, {"path": "a b ✓.mp4", "text": "cat", "box": {"x": 1}}]
    (folder / "in.json").write_text(json.dumps(rows))
    probe_table(folder / "in.json", folder / "out.json")
    out = _rows(folder / "out.json")
    assert [row["tags"] for row in out] == [["a", "b"], None]
    assert [row["box"] for row in out] == [None, {"x": 1}]
    assert [row["text"] for row in out] == ["", "cat"]
    probe_table(folder / "in.json", folder / "out.csv")
    assert [json.loads(row["tags"] or "null") for row in _rows(folder / "out.csv")] == [["a", "b"], None]


def test_a_long_jsonl_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_table, "_ROWS", 4)
    rows = [
        {"path": str(row), "n": row if row < 6 else row + 0.5} | ({"late": "x"} if row > 8 else {}) for row in range(11)
    ]
    write_table(pa.Table.from_pylist(rows), tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.jsonl", "b.jsonl"):
        table = pa.Table.from_batches(open_rows(tmp_path / name).batches())
        assert table["n"].to_pylist() == [row["n"] for row in rows]
        assert table["path"].to_pylist() == [row["path"] for row in rows]
    assert table["late"].to_pylist() == [None] * 9 + ["x"] * 2


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"path": "x"}', "holds one object; it must be one list of objects"),
        ("a.json", '["x"]', "entry 0: a text, expected an object"),
        ("a.json", "[]", "the table has no rows"),
        ("a.jsonl", "[1]\n", "a.jsonl: line 1: a list, expected an object"),
        ("a.jsonl", "", "the table has no rows"),
        ("a.json", '[{"path": "x", "n": ' + "[" * 100_000, "a.json: is not JSON that can be read (nested too deep)"),
        ("a.jsonl", '{"path": "x", "n": ' + "[" * 100_000, "a.jsonl: line 1: not JSON (nested too deep)"),
        ("a.json", '[{"file": "x"}]', "column path is missing (found file)"),
    ],
)
def test_what_is_no_table_is_refused_in_one_sentence(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as raised:
        probe_table(tmp_path / name, tmp_path / "out.csv")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        probe_table(tmp_path / "a.jsonl", tmp_path / "out.csv")
