"""Tables as CSV. DuckDB reads a sound file; one with a fault is read record by record, and costs its faulty rows.

DuckDB counts records where a user counts lines, takes an unclosed quote to the end of the file, and a closed one for a
cell whatever it encloses. So its rows are used only if they account for every line of the file and enclose none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.tables.cells import CsvKind, RawRows
from longtake.data.tables.csv_records import Header, enclosed_row, read_header, records

_ROWS = 1 << 16  # read at once
_BLOCK_BYTES = 1 << 20

ReadTexts = Callable[[Sequence[int]], Iterator[RawRows]]  # some columns, by number, as text


@dataclass(frozen=True)
class CsvTable:
    """An open CSV: its columns, and what reads some of them."""

    schema: pa.Schema
    read: Callable[[Sequence[str]], Iterator[RawRows]]
    lines: np.ndarray  # of each row its first line, from 1: int64 [N]


def open_csv(source: Path, as_text: bool, check_names: Callable[[Sequence[str]], None]) -> CsvTable:
    """Read a CSV once, to learn its kinds of columns and its lines; with `as_text` all columns are text.

    check_names: called with the names of the columns. Raises `UserError` for a header that cannot be read.
    """
    if source.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty; its first line should name the columns, at least path and text")
    with _mapped(source) as data:
        header = read_header(data, source)
        num_breaks = _num_breaks(data, header.end)
    check_names(header.names)
    kinds = [CsvKind(name, as_text) for name in header.names]
    read_texts: ReadTexts = lambda columns: _sound_rows(source, header, columns)  # noqa: E731
    lines = _sound_lines(read_texts, header, num_breaks, kinds)
    if lines is None:
        kinds = [CsvKind(name, as_text) for name in header.names]
        read_texts = lambda columns: _single_rows(source, header, columns)  # noqa: E731
        numbers: list[int] = []
        for raw in _single_rows(source, header, range(len(kinds)), numbers.append):
            for kind, cells in zip(kinds, raw.batch.columns, strict=True):
                kind.add(cells)
        lines = np.array(numbers, np.int64)

    def read(names: Sequence[str]) -> Iterator[RawRows]:
        columns = [header.names.index(name) for name in names]
        for raw in read_texts(columns):
            cells = [kinds[column].cast(raw.batch.column(at)) for at, column in enumerate(columns)]
            yield RawRows(pa.RecordBatch.from_arrays(cells, names=list(names)), raw.lost)

    schema = pa.schema([(name, kind.kind) for name, kind in zip(header.names, kinds, strict=True)])
    return CsvTable(schema, read, lines)


def _sound_rows(source: Path, header: Header, columns: Sequence[int]) -> Iterator[RawRows]:
    """Yield the rows as DuckDB reads them. Raises duckdb.Error."""
    import duckdb

    all_text = {f"c{column}": "VARCHAR" for column in range(len(header.names))}
    wanted = ", ".join(f"coalesce(c{column}, '') AS c{column}" for column in columns)
    options = "auto_detect = false, header = false, strict_mode = true, delim = ',', quote = '\"', escape = '\"'"
    options += ", compression = 'none', hive_partitioning = false"
    query = f"SELECT {wanted} FROM read_csv(?, columns = ?, skip = ?, {options})"
    settings = {"threads": 1, "preserve_insertion_order": True}
    with duckdb.connect(config=settings) as connection:
        found = connection.sql(query, params=[escape(str(source.absolute())), all_text, header.next_line - 1])
        for batch in found.to_arrow_reader(_ROWS):
            yield RawRows(batch, {})


def _sound_lines(read_texts: ReadTexts, header: Header, num_breaks: int, kinds: Sequence[CsvKind]) -> np.ndarray | None:
    """Return the lines of all rows where DuckDB's rows account for all of them; None for a file with a fault.

    num_breaks: line breaks behind the header, one at the end of the file included. `kinds` sees all cells.
    """
    import duckdb

    spans = []
    try:
        for raw in read_texts(range(len(header.names))):
            span = np.ones(len(raw.batch), np.int64)
            for kind, cells in zip(kinds, raw.batch.columns, strict=True):
                kind.add(cells)
                breaks = _breaks_in(cells)
                span += breaks
                for cell in cells.filter(pa.array(breaks > 0)).to_pylist():
                    if enclosed_row([cell.encode()], header) is not None:
                        return None
            spans.append(span)
    except (duckdb.Error, pa.ArrowException):
        return None
    ends = np.cumsum(np.concatenate(spans)) if spans else np.zeros(0, np.int64)
    if (int(ends[-1]) if len(ends) else 0) != num_breaks:
        return None
    return header.next_line + np.concatenate([np.zeros(min(len(ends), 1), np.int64), ends[:-1]])


def _single_rows(
    source: Path, header: Header, columns: Sequence[int], on_line: Callable[[int], None] | None = None
) -> Iterator[RawRows]:
    """Yield the rows record by record; of a faulty one all cells are empty. `on_line` gets the first line of each."""
    with _mapped(source) as data:
        cells: list[list[bytes | None]] = [[] for _ in columns]
        lost: dict[int, str] = {}
        num_rows = 0
        for line, record in records(data, header):
            if on_line is not None:
                on_line(line)
            if isinstance(record, str):
                lost[num_rows] = record
            for column, values in zip(columns, cells, strict=True):
                values.append(None if isinstance(record, str) else record[column])
            num_rows += 1
            if num_rows == _ROWS:
                yield RawRows(_texts(cells, columns), lost)
                cells, lost, num_rows = [[] for _ in columns], {}, 0
        if num_rows:
            yield RawRows(_texts(cells, columns), lost)


def _texts(cells: Sequence[list[bytes | None]], columns: Sequence[int]) -> pa.RecordBatch:
    """Columns of text that need not be UTF-8: `readable_cells` looks at that."""
    arrays = [pa.array(values, pa.binary()).view(pa.string()) for values in cells]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{column}" for column in columns])


def _breaks_in(cells: pa.Array) -> np.ndarray:
    """Line breaks in each cell: int64 [N]."""
    count = [np.asarray(pc.count_substring(cells, mark)).astype(np.int64) for mark in ("\n", "\r", "\r\n")]
    return count[0] + count[1] - count[2]


def _num_breaks(data: mmap.mmap, start: int) -> int:
    """Line breaks from `start` on, one at the end of the file whether it is written or not."""
    if start >= len(data):
        return 0
    count, before = 0, b""
    for position in range(start, len(data), _BLOCK_BYTES):
        block = data[position : position + _BLOCK_BYTES]
        count += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
        count -= before == b"\r" and block[:1] == b"\n"
        before = block[-1:]
    return count + (before not in (b"\n", b"\r"))


@contextmanager
def _mapped(source: Path) -> Iterator[mmap.mmap]:
    with open(source, "rb") as file, closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        yield data
