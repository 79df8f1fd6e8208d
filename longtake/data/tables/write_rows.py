"""A table written batch by batch: CSV, Parquet, Arrow, JSON or JSONL by the suffix, complete or absent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.formats import FORMAT
from longtake.data.tables.json_table import JsonWriter
from longtake.durable import unfinished

SUFFIXES = (".csv", ".parquet", ".arrow", ".json", ".jsonl")
PARQUET_ROWS = 1 << 16  # of a row group: readers hold a few of them at a time


class TableWriter:
    """An output table. Use as a context manager; the file gets its name when the body ends without an error."""

    def __init__(self, target: Path, schema: pa.Schema, metadata: dict[str, str] | None = None):
        """`target`: checked with `check_target` before. `metadata`: kept beside the format's, but not in text files."""
        self.target, self.rows = target, 0
        self._schema = schema.with_metadata(FORMAT | (metadata or {}))
        self._held: list[pa.RecordBatch] = []
        self._count = 0
        self._place = ExitStack()

    def __enter__(self) -> TableWriter:
        path = self._place.enter_context(unfinished(self.target))
        suffix = self.target.suffix.lower()
        if suffix == ".csv":
            flat = [pa.field(field.name, pa.string()) if _is_nested(field.type) else field for field in self._schema]
            self._schema = pa.schema(flat)
            self._writer = pyarrow.csv.CSVWriter(str(path), self._schema)
        elif suffix == ".parquet":
            self._writer = pyarrow.parquet.ParquetWriter(str(path), self._schema)
        elif suffix == ".arrow":
            self._writer = pa.ipc.new_file(str(path), self._schema)
        else:
            self._writer = JsonWriter(path)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows, whose columns are those of the schema."""
        self.rows += len(batch)
        self._held.append(batch)
        self._count += len(batch)
        if self._count >= PARQUET_ROWS:
            self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._held:
                self._write()
            self._writer.close()
        except BaseException:
            self._place.__exit__(*sys.exc_info())
            raise
        self._place.__exit__(kind, error, trace)

    def _write(self) -> None:
        columns = []
        for field in self._schema:
            cells = pa.chunked_array([batch.column(field.name) for batch in self._held]).combine_chunks()
            if pa.types.is_string(field.type) and _is_nested(cells.type):
                texts = [None if cell is None else json.dumps(cell, default=str) for cell in cells.to_pylist()]
                cells = pa.array(texts, pa.string())
            columns.append(cells)
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if isinstance(self._writer, pyarrow.parquet.ParquetWriter):
            self._writer.write_batch(batch, row_group_size=PARQUET_ROWS)
        else:
            self._writer.write_batch(batch)
        self._held, self._count = [], 0


def write_table(columns: pa.Table, target: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a table that is in memory. Lists and objects, which a CSV has no cells for, become JSON in one."""
    with TableWriter(target, columns.schema, metadata) as writer:
        for batch in columns.to_batches(max_chunksize=PARQUET_ROWS):
            writer.write(batch)


def check_target(target: Path, sources: Iterable[Path]) -> None:
    """Raises `UserError` where a table cannot be written to `target`: its suffix, or that it is one of the sources."""
    if target.suffix.lower() not in SUFFIXES:
        *most, last = SUFFIXES
        raise UserError(f"{target}: tables end in {', '.join(most)} or {last}, not {target.suffix or 'nothing'!r}")
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise UserError(f"{target}: would overwrite the table it is made from; give the output another name")
        if source.is_dir() and target.absolute().is_relative_to(source.absolute()):
            raise UserError(f"{target}: lies inside the shards it is made from; give the output another place")


def joined_schema(schemas: Sequence[tuple[Path, pa.Schema]]) -> pa.Schema:
    """The columns of all tables by name, in the order of their first coming, each of a kind that holds them all.

    Whole and decimal numbers become decimal; numbers and text become text. Raises `UserError` for lists and objects
    that do not go together.
    """
    fields: dict[str, tuple[Path, pa.DataType]] = {}
    for source, schema in schemas:
        for field in schema:
            before = fields.setdefault(field.name, (source, field.type))
            fields[field.name] = (source, _joined(field.name, *before, source, field.type))
    return pa.schema([(name, kind) for name, (_, kind) in fields.items()])


def _joined(name: str, first: Path, one: pa.DataType, second: Path, other: pa.DataType) -> pa.DataType:
    pair = [pa.schema([(name, kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        if not _is_nested(one) and not _is_nested(other):
            return pa.string()
        raise UserError(
            f"{second}: column {name} holds {other}, and {one} in {first}; give one of them another name"
        ) from error


def _is_nested(kind: pa.DataType) -> bool:
    return pa.types.is_nested(kind)
