"""Tables as JSON: `.json` holds one list of objects, `.jsonl` one object a line; keys are the columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from longtake.contracts import UserError

SUFFIXES = (".json", ".jsonl")
_ROWS = 65536  # rows that are Python objects at once, in a .jsonl


def read_json(source: Path) -> pa.Table:
    """The whole table. A key that an object lacks is empty in its row; `path` and `text` are text, `clip_id` uint64.

    Raises `UserError` with the line or row where the file is no such table, and for a column of mixed kinds.
    """
    tables = list(tables_of(source))
    if not tables:
        raise UserError(f"{source}: the table has no rows; list one clip an object with its path and text")
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"{source}: a column changes its kind from row to row ({error}); make it one kind") from error


def tables_of(source: Path) -> Iterator[pa.Table]:
    """The rows, some ten thousand at a time; a `.json` is held in memory whole. Raises as `read_json` does."""
    objects = _objects_of_lines(source) if source.suffix.lower() == ".jsonl" else _objects_of_list(source)
    names: dict[str, None] = {}
    while rows := list(islice(objects, _ROWS)):
        for row in rows:
            names |= dict.fromkeys(row)
        yield pa.table({name: _column([row.get(name) for row in rows], name, source) for name in names})


def write_json(columns: pa.Table, path: Path) -> None:
    """Writes a table by the suffix of `path`; what is empty or not a number becomes null."""
    with closing(JsonWriter(path)) as writer:
        for batch in columns.to_batches(max_chunksize=_ROWS):
            writer.write_batch(batch)


class JsonWriter:
    """A `.json` or `.jsonl` written batch by batch."""

    def __init__(self, path: Path):
        """Opens the file; the suffix chooses between a list of objects and one object a line."""
        self._lines, self._empty = path.suffix.lower() == ".jsonl", True
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Adds rows; what is empty or not a number becomes null."""
        for row in batch.to_pylist():
            text = json.dumps({name: _jsonable(value) for name, value in row.items()}, ensure_ascii=False)
            before = ("" if self._lines else "[\n") if self._empty else ("\n" if self._lines else ",\n")
            self._file.write(before + text)
            self._empty = False

    def close(self) -> None:
        """Writes the end and closes the file."""
        if self._lines:
            self._file.write("" if self._empty else "\n")
        else:
            self._file.write("[]\n" if self._empty else "\n]\n")
        self._file.close()


def _objects_of_lines(source: Path) -> Iterator[dict[str, Any]]:
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{source}:{number}: is not JSON ({error}); each line must be one object") from error
            if not isinstance(row, dict):
                raise UserError(f"{source}:{number}: holds {_kind(row)}; each line must be one object")
            yield row


def _objects_of_list(source: Path) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(source.read_bytes())
    except ValueError as error:
        raise UserError(f"{source}: is not JSON ({error}); it must be one list of objects") from error
    if not isinstance(rows, list):
        raise UserError(f"{source}: holds {_kind(rows)}; it must be one list of objects, one for each clip")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{source}: entry {number} is {_kind(row)}; it must be an object with the columns as keys")
        yield row


def _column(values: list[Any], name: str, source: Path) -> pa.Array:
    if name in ("path", "text"):
        return pa.array([value if value is None else str(value) for value in values], pa.string())
    try:
        return pa.array(values, pa.uint64() if name == "clip_id" else None)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise UserError(f"{source}: column {name} holds values of several kinds ({error}); make it one kind") from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool, list, dict)) else str(value)


def _kind(value: object) -> str:
    kinds = {dict: "one object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
