"""A table of any size, read batch by batch and as often as wanted: CSV, Parquet, Arrow, JSON(L), a folder of shards."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.clips.locations import refuse_url
from longtake.data.tables import shards
from longtake.data.tables.cells import NUMBERS, RawRows, plain_schema, readable_cells
from longtake.data.tables.checks import (
    check_columns,
    check_table_format,
    clean_numbers,
    no_rows,
    probe_command,
    readable,
)
from longtake.data.tables.csv_table import CsvTable, open_csv
from longtake.data.tables.ids import path_hashes, repeats
from longtake.data.tables.json_table import open_json
from longtake.data.tables.shards import (
    INDEX,
    invalid_rows,
    is_shards,
    mapped_array,
    read_index,
    shard_files,
    shards_root,
)
from longtake.random import hash64
from longtake.small_files import parse_json

METADATA = {"file_path": "path", "control_file_path": "control"}  # words of other programs -> columns
FOLDER_TABLE = ".longtake.parquet"  # what was probed of a plain folder of clips or of a list, kept beside it
_TEXT_FILES = (".csv", ".json", ".jsonl")
LINE = re.compile(r"line \d+: ")
NOTES = "folder_notes"  # in the metadata of such a table: a JSON array of sentences on files that are not used
STATES = "changed"  # the column in which such a table notes what its files were
SUFFIXES = (".csv", ".parquet", ".arrow", ".feather", ".json", ".jsonl")

Read = Callable[[Sequence[str]], Iterator[RawRows]]  # of some columns, by name


@dataclass(frozen=True)
class Chunk:
    """Some rows of a table, one after the other."""

    first: int  # row of the table
    batch: pa.RecordBatch
    unreadable: dict[int, str]  # row of the table -> why, with its line; what cannot be read is empty in the batch

    @property
    def end(self) -> int:
        return self.first + len(self.batch)


@dataclass(frozen=True)
class Rows:
    """A table as a source of batches. In a CSV a column is numbers where every filled cell is one, else text."""

    source: Path
    schema: pa.Schema
    folder: Path | str  # where its relative paths start; a URL is a string
    read: Read  # raw batches of some columns; `chunks` gives them as `schema` says
    texts: Collection[str] | None = ()  # columns of captions besides `text`; None: any may be one
    unreadable: Mapping[int, str] = field(default_factory=dict)  # of shards: what the table they were made from had
    lines: np.ndarray | None = None  # of each row of a text file the line it begins on, from 1: int64 [N]

    @property
    def names(self) -> list[str]:
        return self.schema.names

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the rows in order, `ROWS_PER_BATCH` at once, of `columns` (None: all). Raises `UserError` for
        damage."""
        names = self.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        size = shards.ROWS_PER_BATCH
        known, found = dict(self.unreadable), dict[int, str]()

        def batches() -> Iterator[pa.RecordBatch]:
            first = 0
            for raw in self.read(names):
                for start in range(0, len(raw.batch), size):
                    batch, wrong = readable_cells(raw.batch.slice(start, size), schema, self.texts)
                    wrong |= {row - start: why for row, why in raw.lost.items() if start <= row < start + len(batch)}
                    found.update(self.with_lines({first + row: wrong[row] for row in sorted(wrong)}))
                    first += len(batch)
                    yield batch

        with readable(self.source):
            end = 0
            for batch in _whole_batches(batches(), schema, size):
                first, end = end, end + len(batch)
                yield Chunk(first, batch, _taken_before(known, end) | _taken_before(found, end))

    def with_lines(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Reasons by row, each with the row's line where the table has lines and the reason does not name it."""
        if self.lines is None:
            return dict(reasons)
        named = {row: why for row, why in reasons.items() if LINE.match(why) or row >= len(self.lines)}
        return {row: named.get(row, f"line {self.lines[row]}: {why}") for row, why in reasons.items()}

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return the batches of `chunks`."""
        return (chunk.batch for chunk in self.chunks(columns))

    def whole(self, columns: Sequence[str] | None = None) -> tuple[pa.Table, dict[int, str]]:
        """Return the rows of all chunks as one table, and all that are `unreadable`. Raises `UserError` if there is no
        row."""
        chunks = [*self.chunks(columns)]
        if not chunks:
            raise no_rows(self.source)
        unreadable = {row: reason for chunk in chunks for row, reason in chunk.unreadable.items()}
        return pa.Table.from_batches([chunk.batch for chunk in chunks]), unreadable

    def with_ids(self) -> Iterator[Chunk]:
        """All rows, clip_id included as uint64: the table's own, or made from its paths as it has them."""
        ids = self.ids()
        for chunk in self.chunks():
            own, place = pa.array(ids[chunk.first : chunk.end]), chunk.batch.schema.get_field_index("clip_id")
            add = chunk.batch.append_column if place < 0 else partial(chunk.batch.set_column, place)
            yield replace(chunk, batch=add("clip_id", own))

    def ids(self) -> np.ndarray:
        """Return the clip ids of all rows, uint64 [N], 8 bytes a row; equal ones are not looked for where given."""
        if "clip_id" in self.names:
            chunks = self.chunks(["clip_id"])
            found = [id_values(each.batch.column(0), self.source, each.first, each.unreadable) for each in chunks]
            return np.concatenate(found) if found else np.empty(0, np.uint64)
        hashes, lost = [], []
        for chunk in self.chunks(["path"]):
            hashes.append(path_hashes(byte_texts(chunk.batch.column(0))))
            lost += [*chunk.unreadable]
        ids = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        self.tell_apart(ids)
        for row in lost:  # in other tables too rows may have no path
            ids[row] = _id_of_lost(self.source, row)
        return ids

    def tell_apart(self, ids: np.ndarray) -> None:
        """Give the n-th row of a path its own id, in place; `ids`: hashes of the paths, uint64 [N]."""
        rows, ordinals = repeats(ids)
        for row, ordinal, path in zip(rows.tolist(), ordinals.tolist(), self._paths_of(rows), strict=True):
            ids[row] = hash64(path, ordinal)

    def _paths_of(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield the paths of some rows, given in ascending order."""
        for chunk in self.chunks(["path"]) if len(rows) else ():
            here = rows[np.searchsorted(rows, chunk.first) : np.searchsorted(rows, chunk.end)] - chunk.first
            yield from byte_texts(chunk.batch.column(0).take(pa.array(here)))


def open_rows(source: Path, as_text: bool = False, texts: Collection[str] | None = ()) -> Rows:
    """Open a table by its suffix, or a folder of shards; a CSV and a JSONL are read once to learn their columns.

    With `as_text` every column of a CSV is text. texts: columns of captions besides `text`, for `plain_schema`. A
    `.json` (one list) is held in memory whole. Raises `UserError` for a file that is missing, of an unknown kind,
    damaged, or of a newer format version, for columns that share a name, and for a path or text that is no text.
    """
    suffix = source.suffix.lower()
    if is_shards(source):
        return _shard_rows(source, texts)
    if source.is_dir():
        raise UserError(
            f"{source}: is a folder without {INDEX} of shards; `{probe_command(source)}` makes a table of its clips"
        )
    if not source.is_file():
        refuse_url(source)
        raise UserError(f"{source}: no such file; give a clip table as .csv, .parquet, .arrow, .json, .jsonl or shards")
    if suffix not in SUFFIXES:
        raise UserError(f"{source}: tables end in {', '.join(SUFFIXES[:-1])} or .jsonl, not {suffix or 'nothing'!r}")
    lines = None
    with readable(source):
        if suffix in _TEXT_FILES:
            table = _open_csv(source, as_text) if suffix == ".csv" else open_json(source, texts or ())
            raw, read, lines = table.schema, table.read, table.lines
        else:
            raw, read = _READERS[suffix](source)
        refuse_repeated_names(raw.names, source)
    check_table_format(raw.metadata, source)
    schema = raw if suffix == ".csv" else plain_schema(raw, source, texts)
    if source.name.endswith(FOLDER_TABLE) and STATES in schema.names:
        schema = schema.remove(schema.get_field_index(STATES))
    return Rows(source, schema, source.parent, read, texts, lines=lines)


def _open_csv(source: Path, as_text: bool) -> CsvTable:
    return open_csv(source, as_text, lambda names: refuse_repeated_names(names, source))


def our_names(names: Sequence[str]) -> list[str]:
    """Return the columns of a list, those of training programs' metadata under the names they have in clip tables."""
    return [name if name not in METADATA or METADATA[name] in names else METADATA[name] for name in names]


def folder_notes(table: Path) -> list[str]:
    """Return notes on the folder or list whose table this is, such as files that are not used; else nothing."""
    if not table.name.endswith(FOLDER_TABLE):
        return []
    try:
        metadata = pyarrow.parquet.read_schema(table).metadata or {}
        return [str(note) for note in parse_json(metadata.get(NOTES.encode(), b"[]"))]
    except (OSError, ValueError, TypeError, pa.ArrowException):
        return []


def read_numbers(source: Path) -> dict[str, np.ndarray]:
    """Return the numbers of a whole table, and `clip_ids`, uint64 [N]: about 50 bytes a row, and none of its texts.

    So a row of which only a text cannot be read counts as any other. Raises `UserError` as `open_rows` and
    `check_columns` do.
    """
    rows = open_rows(source)
    check_columns(rows.names, source)
    wanted = [name for name in ("path", *NUMBERS) if name in rows.names]
    found = [clean_numbers(chunk.batch, chunk.unreadable, chunk.first)[0] for chunk in rows.chunks(wanted)]
    if not found:
        raise no_rows(rows.source)
    joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    return joined | {"clip_ids": rows.ids()}


def refuse_repeated_names(names: Sequence[str], source: Path) -> None:
    """Raise `UserError` where columns share a name, or several have none."""
    if names.count("") > 1:
        numbers = ", ".join(str(number) for number, name in enumerate(names, start=1) if not name)
        raise UserError(f"{source}: columns {numbers} have no name; delete them, or name them in the first line")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{source}: there are several columns {', '.join(repeated)}; names of columns must differ")


def id_values(
    column: pa.Array | pa.ChunkedArray, source: Path, first_row: int = 0, unreadable: Collection[int] = ()
) -> np.ndarray:
    """Cells of a column clip_id, integers or their digits, as uint64 [N]; rows that are `unreadable`, counted from
    `first_row`, may lack one. `UserError` names the first wrong cell."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    elif not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise UserError(f"{source}: column clip_id holds {column.type}; it must hold whole numbers")
    lost = [row - first_row for row in unreadable if column[row - first_row].as_py() in (None, "")]
    if lost:
        column = pc.cast(column, pa.uint64()) if pa.types.is_null(column.type) else column
        zero = pa.scalar("0" if pa.types.is_string(column.type) else 0, column.type)
        column = pc.if_else(pa.array(np.isin(np.arange(len(column)), lost)), zero, column)
    try:
        ids = pc.cast(column, pa.uint64())
        if not ids.null_count:
            values = ids.to_numpy() if isinstance(ids, pa.ChunkedArray) else ids.to_numpy(zero_copy_only=False)
            if lost:
                values = values.copy()
                values[lost] = [_id_of_lost(source, first_row + row) for row in lost]
            return values
    except pa.ArrowInvalid:
        pass
    wrong = ((row, value) for row, value in enumerate(column.to_pylist()) if not _is_id(value))
    row, value = next(wrong, (0, column[0].as_py()))
    found = "empty" if value in (None, "") else repr(value)
    raise UserError(
        f"{source}: clip_id of row {first_row + row} is {found}; it must be a whole number from 0 below 2**64 in every "
        "row: leave the column out to have ids made from the paths"
    )


def _id_of_lost(source: Path, row: int) -> int:
    """Return an id for a row that could not be read."""
    return hash64(os.fspath(source), row)


def _is_id(value: object) -> bool:
    text = str(value)
    return text.isdecimal() and int(text) < 2**64


def byte_texts(column: pa.Array) -> list[bytes]:
    """Return a column of texts as UTF-8, nothing where one is empty."""
    return pc.fill_null(column, "").cast(pa.binary()).to_pylist()


def _taken_before(rows: dict[int, str], end: int) -> dict[int, str]:
    """Take the rows below `end` out of `rows`, which are in ascending order."""
    return {row: rows.pop(row) for row in [*takewhile(lambda row: row < end, rows)]}


def _whole_batches(batches: Iterator[pa.RecordBatch], schema: pa.Schema, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of exactly `size`, the last one the rest."""
    held = schema.empty_table()
    for batch in batches:
        if not len(held) and len(batch) == size:
            yield batch
            continue
        held = pa.concat_tables([held, pa.Table.from_batches([batch], schema)])
        while len(held) >= size:
            yield from held.slice(0, size).combine_chunks().to_batches()
            held = held.slice(size)
    yield from held.combine_chunks().to_batches()


def _parquet_rows(source: Path) -> tuple[pa.Schema, Read]:
    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # With a buffer size, pages of a column are read as they are needed, however large its row groups are.
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from map(RawRows, file.iter_batches(shards.ROWS_PER_BATCH, columns=list(columns)))

    with pyarrow.parquet.ParquetFile(source) as file:
        return file.schema_arrow, read


def _arrow_rows(source: Path) -> tuple[pa.Schema, Read]:
    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(source)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield RawRows(reader.get_batch(number).select(list(columns)))

    with pa.memory_map(str(source)) as file, pa.ipc.open_file(file) as reader:
        return reader.schema, read


def _shard_rows(source: Path, texts: Collection[str] | None) -> Rows:
    folder = source if source.is_dir() else source.parent
    index = read_index(folder)
    files = shard_files(folder, index)
    with readable(folder):
        schema, _ = _arrow_rows(files[0])
        stored_names, ids = set(schema.names), "clip_id" not in schema.names

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        stored = mapped_array(folder / "clip_ids.npy", index["rows"])
        start = 0
        wanted = [name for name in columns if name in stored_names]
        for file in files:
            for raw in _arrow_rows(file)[1](wanted):
                batch = raw.batch
                if ids and "clip_id" in columns:
                    batch = batch.append_column("clip_id", pa.array(np.asarray(stored[start : start + len(batch)])))
                start += len(batch)
                yield RawRows(batch)

    if ids:
        schema = schema.append(pa.field("clip_id", pa.uint64()))
    unreadable = invalid_rows(folder, only_unreadable=True)
    schema = plain_schema(schema, folder, texts)
    return Rows(folder, schema, shards_root(folder, index), read, texts, unreadable)


_READERS: dict[str, Callable[[Path], tuple[pa.Schema, Read]]] = {
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".feather": _arrow_rows,
}
