"""A table of any size, read batch by batch and as often as wanted: CSV, Parquet, Arrow, JSON(L), a folder of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.clips.remote import refuse_url
from longtake.data.formats import check_table_format
from longtake.data.tables import json_table
from longtake.data.tables.ids import path_hashes, repeats
from longtake.data.tables.shards import INDEX, is_shards, read_index, shard_files, shards_root
from longtake.random import hash64

BATCH_ROWS = 1 << 16
SUFFIXES = (".csv", ".parquet", ".arrow", ".feather", ".json", ".jsonl")
_CSV = pyarrow.csv.ParseOptions(newlines_in_values=True)
_CSV_BLOCK_BYTES = 1 << 22  # no row may be longer
_EMPTY_NUMBERS = pa.array(  # what pyarrow reads as an empty cell in a column of numbers
    [
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "n/a",
        "nan",
        "null",
    ]
)

Read = Callable[[Sequence[str] | None], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Rows:
    """A table as a source of batches. In a CSV a column is numbers where every filled cell is one, else text."""

    source: Path
    schema: pa.Schema
    folder: Path | str  # where its relative paths start; a URL is a string
    read: Read  # raw batches of some columns; `batches` gives them as `schema` says

    @property
    def names(self) -> list[str]:
        return self.schema.names

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Batches of at most `BATCH_ROWS` rows in the order of the table; `columns`: some of them, default all.

        Raises `UserError` where the file proves to be damaged on the way.
        """
        names = self.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        with readable(self.source):
            for batch in self.read(None if columns is None else names):
                for start in range(0, len(batch), BATCH_ROWS):
                    yield aligned(batch.slice(start, BATCH_ROWS), schema)

    def with_ids(self) -> Iterator[pa.RecordBatch]:
        """All batches, clip_id included as uint64: the table's own, or made from its paths as it has them."""
        ids, start = self.ids(), 0
        for batch in self.batches():
            own = pa.array(ids[start : start + len(batch)])
            start += len(batch)
            place = batch.schema.get_field_index("clip_id")
            yield batch.append_column("clip_id", own) if place < 0 else batch.set_column(place, "clip_id", own)

    def ids(self) -> np.ndarray:
        """The clip ids of all rows, uint64 [N], 8 bytes a row; equal ones are not looked for where given."""
        if "clip_id" in self.names:
            start, found = 0, []
            for batch in self.batches(["clip_id"]):
                found.append(id_values(batch.column(0), self.source, start))
                start += len(batch)
            return np.concatenate(found) if found else np.empty(0, np.uint64)
        hashes = [path_hashes(_bytes(batch.column(0))) for batch in self.batches(["path"])]
        ids = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        rows, ordinals = repeats(ids)
        for row, ordinal, path in zip(rows.tolist(), ordinals.tolist(), self._paths_of(rows), strict=True):
            ids[row] = hash64(path, ordinal)
        return ids

    def _paths_of(self, rows: np.ndarray) -> Iterator[bytes]:
        """The paths of some rows, given in ascending order."""
        start = 0
        for batch in self.batches(["path"]) if len(rows) else ():
            here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(batch))] - start
            yield from _bytes(batch.column(0).take(pa.array(here)))
            start += len(batch)


def open_rows(source: Path) -> Rows:
    """Opens a table by its suffix, or a folder of shards; a CSV and a JSONL are read once to learn their columns.

    A `.json` (one list) is held in memory whole. Raises `UserError` for a file that is missing, of an unknown kind,
    damaged, or of a newer format version, for columns that share a name, and for a path or text that is no text.
    """
    suffix = source.suffix.lower()
    if is_shards(source):
        return _shard_rows(source)
    if source.is_dir():
        raise UserError(
            f"{source}: is a folder without {INDEX} of shards; `longtake data probe {source} -o clips.parquet` makes a "
            "table of the clips in a folder"
        )
    if not source.is_file():
        refuse_url(source)
        raise UserError(f"{source}: no such file; give a clip table as .csv, .parquet, .arrow, .json, .jsonl or shards")
    if suffix not in SUFFIXES:
        raise UserError(f"{source}: tables end in {', '.join(SUFFIXES[:-1])} or .jsonl, not {suffix or 'nothing'!r}")
    with readable(source):
        raw, read = _READERS[suffix](source)
    refuse_repeated_names(raw.names, source)
    check_table_format(raw.metadata, source)
    return Rows(source, _plain_schema(raw, source), source.parent, read)


def refuse_repeated_names(names: Sequence[str], source: Path) -> None:
    """Raises `UserError` where columns share a name."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{source}: there are several columns {', '.join(repeated)}; names of columns must differ")


def csv_names(written: Sequence[str], source: Path) -> list[str]:
    """The columns of a CSV by its header line, without the blanks around the names: `path, text` has a column text.

    Raises `UserError` where columns share a name, or would without the blanks.
    """
    names = [name.strip() for name in written]
    refuse_repeated_names(names, source)
    return names


def id_values(column: pa.Array | pa.ChunkedArray, source: Path, first_row: int = 0) -> np.ndarray:
    """Cells of a column clip_id, integers or their digits, as uint64 [N]. `UserError` names the first wrong cell."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    elif not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise UserError(f"{source}: column clip_id holds {column.type}; it must hold whole numbers")
    try:
        ids = pc.cast(column, pa.uint64())
        if not ids.null_count:
            return ids.to_numpy() if isinstance(ids, pa.ChunkedArray) else ids.to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        pass
    wrong = ((row, value) for row, value in enumerate(column.to_pylist()) if not _is_id(value))
    row, value = next(wrong, (0, column[0].as_py()))
    found = "empty" if value in (None, "") else repr(value)
    raise UserError(
        f"{source}: clip_id of row {first_row + row} is {found}; it must be a whole number from 0 below 2**64 in every "
        "row: leave the column out to have ids made from the paths"
    )


def aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns and kinds of `schema`; a column it lacks is empty. Raises `pa.ArrowException`."""
    columns = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            columns.append(pa.nulls(len(batch), field.type))
            continue
        column = batch.column(place)
        columns.append(column if column.type == field.type else pc.cast(column, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@contextmanager
def readable(source: Path) -> Iterator[None]:
    """Turns what pyarrow says of a damaged file into a `UserError` of one line."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = source.suffix[1:] or "shards"
        raise UserError(f"{source}: cannot be read as {kind} ({first_line}); write the table again") from error


def _is_id(value: object) -> bool:
    text = str(value)
    return text.isdecimal() and int(text) < 2**64


def _bytes(column: pa.Array) -> list[bytes]:
    return pc.fill_null(column, "").cast(pa.binary()).to_pylist()


def _plain_schema(schema: pa.Schema, source: Path) -> pa.Schema:
    """One kind of text, and no dictionaries: what every writer and DuckDB take."""
    fields = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            kind = pa.string()
        if field.name in ("path", "text"):
            if not (pa.types.is_string(kind) or pa.types.is_null(kind)):
                raise UserError(f"{source}: column {field.name} holds {kind}; it must hold text")
            kind = pa.string()
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _csv_rows(source: Path) -> tuple[pa.Schema, Read]:
    if source.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty; its first line should name the columns, at least path and text")
    read_options = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    with pyarrow.csv.open_csv(source, read_options=read_options, parse_options=_CSV) as reader:
        written = reader.schema.names
    names = csv_names(written, source)
    as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(written, pa.string()), strings_can_be_null=False)
    kinds = dict.fromkeys(names, pa.null()) | dict.fromkeys(("path", "text", "clip_id"), pa.string())
    with pyarrow.csv.open_csv(source, read_options, _CSV, as_text) as reader:
        for batch in reader:
            for name, cells in zip(names, batch.columns, strict=True):
                kinds[name] = _widened(kinds[name], cells)
    kinds = {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in kinds.items()}

    places = dict(zip(names, written, strict=True))

    def read(columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        wanted = list(columns or names)
        options = pyarrow.csv.ConvertOptions(
            column_types={places[name]: kinds[name] for name in wanted},
            strings_can_be_null=False,
            include_columns=[places[name] for name in wanted],
        )
        with pyarrow.csv.open_csv(source, read_options, _CSV, options) as reader:
            for batch in reader:
                yield batch.rename_columns(wanted)

    return pa.schema([(name, kinds[name]) for name in names]), read


def _widened(kind: pa.DataType, cells: pa.Array) -> pa.DataType:
    """The kind of a column of texts, once these cells of it are seen too: null, int64, double or string."""
    if pa.types.is_string(kind):
        return kind
    cells = pc.utf8_trim_whitespace(cells)
    cells = cells.filter(pc.invert(pc.is_in(cells, value_set=_EMPTY_NUMBERS)))
    if not len(cells):
        return kind
    if pc.any(pc.match_substring_regex(cells, r"^[+-]?0\d")).as_py():  # a name such as 007, not a number
        return pa.string()
    for wider in (pa.int64(), pa.float64()):
        if pa.types.is_floating(kind) and pa.types.is_integer(wider):
            continue
        try:
            pc.cast(cells, wider)
            return wider
        except pa.ArrowInvalid:
            continue
    return pa.string()


def _parquet_rows(source: Path) -> tuple[pa.Schema, Read]:
    def read(columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        # With a buffer size, pages of a column are read as they are needed, however large its row groups are.
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns))

    with pyarrow.parquet.ParquetFile(source) as file:
        return file.schema_arrow, read


def _arrow_rows(source: Path) -> tuple[pa.Schema, Read]:
    def read(columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(source)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                yield batch if columns is None else batch.select(list(columns))

    with pa.memory_map(str(source)) as file, pa.ipc.open_file(file) as reader:
        return reader.schema, read


def _json_rows(source: Path) -> tuple[pa.Schema, Read]:
    schema = pa.schema([])
    for table in json_table.tables_of(source):
        try:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise UserError(
                f"{source}: a column changes its kind from row to row ({error}); make it one kind"
            ) from error

    def read(columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        for table in json_table.tables_of(source):
            yield from table.to_batches()

    return schema, read


def _shard_rows(source: Path) -> Rows:
    folder = source if source.is_dir() else source.parent
    index = read_index(folder)
    files = shard_files(folder, index)
    with readable(folder):
        schema, _ = _arrow_rows(files[0])
    stored_names, ids = set(schema.names), "clip_id" not in schema.names

    def read(columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        stored = np.load(folder / "clip_ids.npy", mmap_mode="r")
        start = 0
        wanted = None if columns is None else [name for name in columns if name in stored_names]
        for file in files:
            for batch in _arrow_rows(file)[1](wanted):
                if ids and (columns is None or "clip_id" in columns):
                    own = pa.array(np.asarray(stored[start : start + len(batch)]))
                    batch = batch.append_column("clip_id", own)
                start += len(batch)
                yield batch

    if ids:
        schema = schema.append(pa.field("clip_id", pa.uint64()))
    return Rows(folder, _plain_schema(schema, folder), shards_root(folder, index), read)


_READERS: dict[str, Callable[[Path], tuple[pa.Schema, Read]]] = {
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".feather": _arrow_rows,
    ".json": _json_rows,
    ".jsonl": _json_rows,
}
