"""Tables as JSON: `.json` holds one list of objects, `.jsonl` one object a line; keys are the columns.

Python's parser reads them: DuckDB's gives an empty row, without a reason, for a line that is not JSON or not UTF-8.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.tables.cells import NUMBERS, RawRows, holds_json, is_caption, json_field, text_of
from longtake.small_files import encoding_by_mark, is_unicode, parse_json

SUFFIXES = (".json", ".jsonl")
_ROWS = 65536  # rows that are Python objects at once, in a .jsonl

Row = dict[str, Any] | str  # an object, or the reason why it cannot be read


@dataclass(frozen=True)
class JsonTable:
    """An open JSON table: its columns, and what reads some of them."""

    schema: pa.Schema
    read: Callable[[Sequence[str]], Iterator[RawRows]]
    lines: np.ndarray | None  # of each row of a .jsonl its line, from 1: int64 [N]


def open_json(source: Path, texts: Collection[str] = ()) -> JsonTable:
    """Read a table once, to learn its columns; a `.json` is held in memory whole.

    A key that an object lacks is empty in its row; text that is not Unicode comes as bytes that are not UTF-8. A column
    that holds a text anywhere is text, and so are those of `texts`; in another one with values of several kinds the
    cells are JSON. A line or an entry that is not an object costs its row. Raises `UserError` where no row can be read.
    """
    columns: dict[str, _Column] = {}
    numbers: list[int] = []
    first_fault = ""
    for part in _parts(source):
        objects = [row for _, row in part if isinstance(row, dict)]
        for name in dict.fromkeys(name for row in objects for name in row):
            if not is_unicode(name):
                raise UserError(f"{source}: the name of a column, {name!r}, is not text in UTF-8; rename it")
            columns.setdefault(name, _Column(name, is_caption(name, texts))).add([row.get(name) for row in objects])
        faults = [f"{_place(source, number)}: {row}" for number, row in part if isinstance(row, str)]
        first_fault = first_fault or next(iter(faults), "")
        numbers += [number for number, _ in part]
    if not columns and first_fault:
        raise UserError(f"{first_fault}; no row of the table can be read")
    if not columns:
        raise UserError(f"{source}: the table has no rows; list one clip an object with its path and text")

    def read(names: Sequence[str]) -> Iterator[RawRows]:
        for part in _parts(source):
            lost = {row: reason for row, (_, reason) in enumerate(part) if isinstance(reason, str)}
            objects = [row if isinstance(row, dict) else {} for _, row in part]
            cells = [columns[name].convert([row.get(name) for row in objects], lost) for name in names]
            wanted = pa.schema([schema.field(name) for name in names])
            yield RawRows(pa.RecordBatch.from_arrays(cells, schema=wanted), lost)

    schema = pa.schema([column.field for column in columns.values()])
    return JsonTable(schema, read, np.array(numbers, np.int64) if _is_lines(source) else None)


class _Column:
    """The kind of a column, widened value by value."""

    def __init__(self, name: str, is_text: bool):
        self.name = name
        self._is_text = is_text or name == "path"
        self._is_mixed = False  # values of several kinds, none of them a text
        self._kind = pa.uint64() if name == "clip_id" else pa.null()

    @property
    def field(self) -> pa.Field:
        if self._is_mixed and self.name not in (*NUMBERS, "clip_id"):
            return json_field(self.name)
        return pa.field(self.name, pa.string() if self._is_text or self._is_mixed else self._kind)

    def add(self, values: Sequence[Any]) -> None:
        """Look at further values."""
        if self._is_text or self._is_mixed:
            return
        filled = [value for value in values if value is not None]
        if any(isinstance(value, str) for value in filled):
            self._is_text = self.name not in NUMBERS
            self._is_mixed = self.name in NUMBERS
            return
        is_number = self.name in NUMBERS
        try:
            kind = pa.array(filled, pa.uint64() if self.name == "clip_id" else None).type
            pair = [pa.schema([(self.name, each)]) for each in (self._kind, kind)]
            self._kind = pa.unify_schemas(pair, promote_options="permissive").field(0).type
            self._is_mixed = is_number and not _is_number_or_null(self._kind)
        except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
            self._is_mixed = True

    def convert(self, values: Sequence[Any], lost: dict[int, str]) -> pa.Array:
        """Return the column of some values; a value that is not one text in a column of texts adds its row to
        `lost`."""
        if not self._is_text and not self._is_mixed:
            return pa.array(values, self._kind)
        texts: list[bytes | None] = []
        for row, value in enumerate(values):
            text = None
            try:
                text = text_of(value, is_path=self.name == "path") if self._is_text else _json_text(value)
            except ValueError as error:
                lost.setdefault(row, f"{self.name} {error}")
            texts.append(None if text is None else text.encode("utf-8", "surrogatepass"))
        return pa.array(texts, pa.binary()).view(pa.string())


class JsonWriter:
    """A `.json` or `.jsonl` written batch by batch."""

    def __init__(self, path: Path):
        """Open the file; the suffix chooses between a list of objects and one object a line."""
        is_lines = path.suffix.lower() == ".jsonl"
        self._before, self._between, self._end = ("", "\n", "\n") if is_lines else ("[\n", ",\n", "\n]\n")
        self._nothing = "" if is_lines else "[]\n"
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Add rows; what is empty or not a number becomes null."""
        of_json = [field.name for field in batch.schema if holds_json(field)]
        for row in batch.to_pylist():
            for name in of_json:
                row[name] = None if row[name] is None else parse_json(row[name], finite=False)
            text = json.dumps({name: _jsonable(value) for name, value in row.items()}, ensure_ascii=False)
            self._file.write(self._before + text)
            self._before, self._nothing = self._between, self._end

    def close(self) -> None:
        """Write the end and close the file."""
        self._file.write(self._nothing)
        self._file.close()


def objects_of_lines(source: Path) -> Iterator[dict[str, Any]]:
    """Return the objects of a `.jsonl`. Raises `UserError` with the line where it holds something else, and OSError."""
    return (line for _, line in numbered_objects(source))


def numbered_objects(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the same, with the numbers of their lines from 1."""
    for number, row in _rows_of_lines(source):
        if isinstance(row, str):
            raise UserError(f"{source}:{number}: {row}; write one object a line with the columns as keys")
        yield number, row


def _parts(source: Path) -> Iterator[list[tuple[int, Row]]]:
    """Numbered rows, some ten thousand at a time."""
    rows = _rows_of_lines(source) if _is_lines(source) else _rows_of_list(source)
    while part := list(islice(rows, _ROWS)):
        yield part


def _rows_of_lines(source: Path) -> Iterator[tuple[int, Row]]:
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and (encoding := encoding_by_mark(line[:4])):
                raise UserError(f"{source}: line 1: the file is in {encoding}, expected UTF-8; save it as UTF-8")
            if number == 1 and b"\0" in line:
                raise UserError(f"{source}: line 1: it has NUL bytes, as UTF-16 without its mark; save it as UTF-8")
            if line.strip():
                try:
                    yield number, _object(_parsed(line))
                except json.JSONDecodeError as error:
                    yield number, f"not JSON ({error.msg} in column {error.colno})"
                except ValueError as error:
                    yield number, f"not JSON ({error})"


def _rows_of_list(source: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows = _parsed(source.read_bytes())
    except ValueError as error:
        raise UserError(f"{source}: is not JSON that can be read ({error}); write the table again") from error
    if not isinstance(rows, list):
        raise UserError(f"{source}: holds {_kind(rows)}; it must be one list of objects, one for each clip")
    return ((number, _object(row)) for number, row in enumerate(rows))


def _parsed(data: bytes) -> Any:
    """Parse a JSON text; bytes that are not UTF-8 become lone surrogates. Raises `ValueError`."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogateescape")
        return json.loads(text, object_pairs_hook=_read_pairs)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class _Ambiguous(dict[str, Any]):
    """An object that has a key more than once; of its values the last."""

    repeated: str


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    ambiguous = _Ambiguous(values)
    ambiguous.repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return ambiguous


def _object(row: Any) -> Row:
    if isinstance(row, _Ambiguous):
        return f"the key {row.repeated} is there more than once"
    return row if isinstance(row, dict) else f"{_kind(row)}, expected an object"


def _json_text(value: Any) -> str | None:
    """Return a cell of a column of several kinds, none of them text but where numbers are wanted: as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _is_number_or_null(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)


def _is_lines(source: Path) -> bool:
    return source.suffix.lower() == ".jsonl"


def _place(source: Path, number: int) -> str:
    return f"{source}: {'line' if _is_lines(source) else 'entry'} {number}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool, list, dict)) else str(value)


def _kind(value: object) -> str:
    kinds = {dict: "one object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
