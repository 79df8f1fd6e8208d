"""Tables as JSON: `.json` holds one list of objects, `.jsonl` one object a line; keys are the columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from longtake.contracts import UserError
from longtake.small_files import is_unicode

SUFFIXES = (".json", ".jsonl")
_ROWS = 65536  # rows that are Python objects at once, in a .jsonl


def tables_of(source: Path) -> Iterator[pa.Table]:
    """The rows, some ten thousand at a time; a `.json` is held in memory whole.

    A key that an object lacks is empty in its row; `path` and `text` are text. Text that is no Unicode comes as bytes
    that are not UTF-8. Raises `UserError` with the line or row where the file is no such table.
    """
    objects = objects_of_lines(source) if source.suffix.lower() == ".jsonl" else _objects_of_list(source)
    names: dict[str, None] = {}
    while rows := list(islice(objects, _ROWS)):
        for row in rows:
            names |= dict.fromkeys(row)
        if odd := [name for name in names if not is_unicode(name)]:
            raise UserError(f"{source}: the name of a column, {odd[0]!r}, is not text in UTF-8; rename it")
        yield pa.table({name: _column([row.get(name) for row in rows], name, source) for name in names})


class JsonWriter:
    """A `.json` or `.jsonl` written batch by batch."""

    def __init__(self, path: Path):
        """Opens the file; the suffix chooses between a list of objects and one object a line."""
        is_lines = path.suffix.lower() == ".jsonl"
        self._before, self._between, self._end = ("", "\n", "\n") if is_lines else ("[\n", ",\n", "\n]\n")
        self._nothing = "" if is_lines else "[]\n"
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Adds rows; what is empty or not a number becomes null."""
        for row in batch.to_pylist():
            text = json.dumps({name: _jsonable(value) for name, value in row.items()}, ensure_ascii=False)
            self._file.write(self._before + text)
            self._before, self._nothing = self._between, self._end

    def close(self) -> None:
        """Writes the end and closes the file."""
        self._file.write(self._nothing)
        self._file.close()


def objects_of_lines(source: Path) -> Iterator[dict[str, Any]]:
    """The objects of a `.jsonl`. Raises `UserError` with the line where it holds something else, and OSError."""
    return (line for _, line in numbered_objects(source))


def numbered_objects(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same, with the numbers of their lines from 1."""
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(_parsed(line, f"{source}:{number}"), f"{source}:{number}: holds", "each line")


def _objects_of_list(source: Path) -> Iterator[dict[str, Any]]:
    rows = _parsed(source.read_bytes(), str(source))
    if not isinstance(rows, list):
        raise UserError(f"{source}: holds {_kind(rows)}; it must be one list of objects, one for each clip")
    for number, row in enumerate(rows):
        yield _object(row, f"{source}: entry {number} is", "it")


def _parsed(data: bytes, place: str) -> Any:
    """What a JSON text says; bytes that are not UTF-8 become lone surrogates."""
    try:
        return json.loads(data.decode(json.detect_encoding(data), "surrogateescape"))
    except (ValueError, RecursionError) as error:
        said = "nested too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{place}: is not JSON that can be read ({said}); write the table again") from error


def _object(row: Any, found: str, what: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{found} {_kind(row)}; {what} must be an object with the columns as keys")
    return row


def _column(values: list[Any], name: str, source: Path) -> pa.Array:
    if name not in ("path", "text"):
        try:
            return pa.array(values, pa.uint64() if name == "clip_id" else None)
        except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as error:
            if any(isinstance(value, (list, dict)) for value in values):
                raise UserError(
                    f"{source}: column {name} holds values of several kinds ({error}); make it one kind"
                ) from error
    texts = [None if value is None else _text(value, name).encode("utf-8", "surrogatepass") for value in values]
    return pa.array(texts, pa.binary()).view(pa.string())


def _text(value: Any, name: str) -> str:
    """A cell of a column of texts; in one of mixed kinds, numbers as a cast of their column would write them."""
    if isinstance(value, str) or name in ("path", "text"):
        return str(value)
    try:
        return pa.scalar(value).cast(pa.string()).as_py()
    except OverflowError:
        return str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool, list, dict)) else str(value)


def _kind(value: object) -> str:
    kinds = {dict: "one object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
