"""A table written batch by batch: CSV, Parquet, Arrow, JSON or JSONL by the suffix; its paths in another folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.clips.locations import is_url, join_location
from longtake.data.tables.checks import FORMAT
from longtake.data.tables.json_table import JsonWriter
from longtake.data.tables.shards import is_shards
from longtake.durable import unfinished

SUFFIXES = (".csv", ".parquet", ".arrow", ".json", ".jsonl")
OF_FILES = ("path", "control")  # columns
PARQUET_ROWS = 1 << 16  # of a row group: readers hold a few of them at a time


class TableWriter:
    """An output table. Use as a context manager; the file gets its name when the body ends without an error."""

    def __init__(self, target: Path, schema: pa.Schema, metadata: dict[str, str] | None = None):
        """`target`: checked with `check_target` before. `metadata`: kept beside the format's, but not in text files."""
        self.target, self.rows = target, 0
        self._schema = schema.with_metadata(FORMAT | (metadata or {}))
        self._held: list[pa.RecordBatch] = []
        self._count = 0

    def __enter__(self) -> TableWriter:
        with ExitStack() as files:
            path = files.enter_context(unfinished(self.target))
            self._writer = files.enter_context(closing(self._open(path)))
            self._files = files.pop_all()
        return self

    def _open(self, path: Path) -> Any:
        suffix = self.target.suffix.lower()
        if suffix == ".csv":
            flat = [field.with_type(pa.string()) if pa.types.is_nested(field.type) else field for field in self._schema]
            self._schema = pa.schema(flat)
            return pyarrow.csv.CSVWriter(str(path), self._schema)
        if suffix == ".parquet":
            return pyarrow.parquet.ParquetWriter(str(path), self._schema)
        return pa.ipc.new_file(str(path), self._schema) if suffix == ".arrow" else JsonWriter(path)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows, whose columns are those of the schema."""
        self.rows += len(batch)
        self._held.append(batch)
        self._count += len(batch)
        if self._count >= PARQUET_ROWS:
            self._write()

    def __exit__(self, *error: Any) -> None:
        with self._files:
            if error[0] is not None:
                raise error[1]
            if self._held:
                self._write()

    def _write(self) -> None:
        columns = []
        for field in self._schema:
            cells = pa.chunked_array([batch.column(field.name) for batch in self._held]).combine_chunks()
            if pa.types.is_string(field.type) and pa.types.is_nested(cells.type):
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
    """Write a table that is in memory. Lists and objects, which a CSV has no cells for, become JSON in one."""
    with TableWriter(target, columns.schema, metadata) as writer:
        for batch in columns.to_batches(max_chunksize=PARQUET_ROWS):
            writer.write(batch)


def check_target(target: Path, sources: Iterable[Path]) -> None:
    """Raise `UserError` where a table cannot be written to `target`: its suffix, or that it is one of the sources."""
    if target.suffix.lower() not in SUFFIXES:
        *most, last = SUFFIXES
        raise UserError(f"{target}: tables end in {', '.join(most)} or {last}, not {target.suffix or 'nothing'!r}")
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise UserError(f"{target}: would overwrite the table it is made from; give the output another name")
        if is_shards(source) and target.resolve().is_relative_to(source.resolve()):
            raise UserError(f"{target}: lies inside the shards it is made from; give the output another place")


def moved_paths(paths: Iterable[str | None], old: Path | str, new: Path) -> list[str]:
    """Paths from folder or URL `old`, rewritten to start from folder `new`; absolute ones, URLs and empty ones stay."""
    written = [path or "" for path in paths]
    if isinstance(old, str):
        return [join_location(old, path) if path else path for path in written]
    start, end = os.path.realpath(old), os.path.realpath(new)
    if start == end:
        return written
    return [
        path if not path or os.path.isabs(path) or is_url(path) else os.path.relpath(os.path.join(start, path), end)
        for path in written
    ]


def moved_batch(batch: Any, old: Path | str, new: Path) -> Any:
    """Return a batch or table of rows, their paths and those of control videos written as by `moved_paths`."""
    if not isinstance(old, str) and os.path.realpath(old) == os.path.realpath(new):
        return batch
    for place, field in enumerate(batch.schema):
        if field.name in OF_FILES and pa.types.is_string(field.type):
            paths = moved_paths(batch.column(place).to_pylist(), old, new)
            batch = batch.set_column(place, field, pa.array(paths, pa.string()))
    return batch
