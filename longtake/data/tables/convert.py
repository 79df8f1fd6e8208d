"""A clip table of any size made into a folder of shards, batch by batch."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.formats import FORMAT, SHARDS_VERSION
from longtake.data.tables.checks import check_columns, fingerprint_of, refuse_repeated
from longtake.data.tables.ids import path_hashes, repeats
from longtake.data.tables.numbers import clean_numbers
from longtake.data.tables.paths import moved_paths, same_start
from longtake.data.tables.rows import Rows, id_values, open_rows
from longtake.data.tables.shards import INDEX, KIND, NUMBERS, ROWS_PER_BATCH, ROWS_PER_FILE, is_shards
from longtake.durable import sync_file, write_whole
from longtake.random import hash64

_NPY_HEADER_BYTES = 128
_INVALID = pa.schema(
    [("row", pa.int64()), ("reason", pa.string())],
    metadata={"longtake_format": "invalid rows", "longtake_format_version": str(SHARDS_VERSION)},
)


@dataclass(frozen=True)
class Converted:
    """What came of a conversion."""

    folder: Path
    rows: int
    invalid: int  # rows whose numbers make no sense
    num_bytes: int  # of all files


def make_shards(
    source: Path,
    target: Path,
    *,
    root: Path | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Converted:
    """Writes the table `source` as a folder of shards `target`, which is complete or absent; memory stays bounded.

    Relative paths are rewritten to start from the folder that `target` lies in; with `root` they stay as they are and
    start there. Clip ids stay: the table's own, or those its paths give where it lies now. A folder of shards at
    `target` is replaced once the new one is complete. `progress(rows)` is called after each batch. Raises `UserError`
    as `ClipTable.open` does.
    """
    rows = open_rows(source)
    check_columns(rows.names, source)
    _check_place(source, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        columns = _Columns(rows, target.parent if root is None else None)
        num_rows, num_invalid = _write_columns(partial, columns, source, progress)
        if not num_rows:
            raise UserError(f"{source}: the table has no rows; list one clip a row with its path and text")
        _complete_ids(partial, columns, source)
        _write_index(partial, rows, num_rows, os.pardir if root is None else _written_root(root))
        num_bytes = sum(file.stat().st_size for file in partial.iterdir())
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(target, num_rows, num_invalid, num_bytes)


def _written_root(root: Path | str) -> str:
    return root if isinstance(root, str) else str(root.absolute())


@dataclass(frozen=True)
class _Columns:
    """The batches that are stored: those of `rows`, with paths that start from `folder` where one is given."""

    rows: Rows
    folder: Path | None

    @property
    def has_ids(self) -> bool:
        return "clip_id" in self.rows.names

    def batches(self) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Batches as they are stored, each with its paths as the source has them."""
        for batch in whole_batches(self.rows.batches(), self.rows.schema, ROWS_PER_BATCH):
            place = batch.schema.get_field_index("path")
            paths = pc.fill_null(batch.column(place), "")
            if self.folder is not None and not same_start(self.rows.folder, self.folder):
                moved = moved_paths(paths.to_pylist(), self.rows.folder, self.folder)
                batch = batch.set_column(place, "path", pa.array(moved, pa.string()))
            yield batch, paths


def whole_batches(batches: Iterator[pa.RecordBatch], schema: pa.Schema, size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `size`, the last one the rest."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += len(batch)
        while count >= size:
            table = pa.Table.from_batches(held, schema).combine_chunks()
            (first,) = table.slice(0, size).combine_chunks().to_batches()
            yield first
            held = table.slice(size).to_batches()
            count -= size
    if count:
        (last,) = pa.Table.from_batches(held, schema).combine_chunks().to_batches()
        yield last


def _write_columns(
    folder: Path, columns: _Columns, source: Path, progress: Callable[[int], None] | None
) -> tuple[int, int]:
    """Writes the Arrow files and the number files, ids not yet told apart; returns how many rows, how many invalid."""
    row = num_invalid = 0
    schema = columns.rows.schema.with_metadata(FORMAT)
    with ExitStack() as stack:
        numbers = {name: _NumberFile(stack.enter_context(open(folder / f"{name}.npy", "wb"))) for name in NUMBERS}
        invalid = stack.enter_context(pa.ipc.new_file(str(folder / "invalid.arrow"), _INVALID))
        writer = None
        for batch, paths in columns.batches():
            if row % ROWS_PER_FILE == 0:
                if writer is not None:
                    writer.close()
                writer = pa.ipc.new_file(str(folder / f"{row // ROWS_PER_FILE:05d}.arrow"), schema)
                stack.callback(writer.close)
            writer.write_batch(batch.replace_schema_metadata(FORMAT))
            found, wrong = clean_numbers(batch, source, row)
            if columns.has_ids:
                found["clip_ids"] = id_values(batch.column("clip_id"), source, row)
            else:
                found["clip_ids"] = path_hashes(paths.cast(pa.binary()).to_pylist())
            for name, values in found.items():
                numbers[name].append(values)
            if wrong:
                invalid.write_batch(pa.record_batch([list(wrong), list(wrong.values())], schema=_INVALID))
            row, num_invalid = row + len(batch), num_invalid + len(wrong)
            if progress:
                progress(row)
        for number in numbers.values():
            number.finish()
    for name, number in numbers.items():
        if not number.count:
            (folder / f"{name}.npy").unlink()
    return row, num_invalid


class _NumberFile:
    """A `.npy` of one dimension that grows until its header is written."""

    def __init__(self, file: BinaryIO):
        self._file, self.count = file, 0
        self._dtype = np.dtype(np.float64)
        file.write(bytes(_NPY_HEADER_BYTES))

    def append(self, values: np.ndarray) -> None:
        self._dtype, self.count = values.dtype, self.count + len(values)
        self._file.write(np.ascontiguousarray(values).data)

    def finish(self) -> None:
        self._file.seek(0)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == _NPY_HEADER_BYTES


def _complete_ids(folder: Path, columns: _Columns, source: Path) -> None:
    """Tells rows of the same path apart by their ordinals, and refuses ids that are equal all the same."""
    ids = np.load(folder / "clip_ids.npy", mmap_mode="r+")
    if columns.has_ids:
        refuse_repeated(ids, source)
        return
    rows, ordinals = repeats(ids)
    if not len(rows):
        return
    start = 0
    for batch in columns.rows.batches(["path"]):
        first, last = np.searchsorted(rows, (start, start + len(batch)))
        paths = pc.fill_null(batch.column(0).take(pa.array(rows[first:last] - start)), "").to_pylist()
        here = zip(paths, ordinals[first:last].tolist(), strict=True)
        ids[rows[first:last]] = [hash64(path, ordinal) for path, ordinal in here]
        start += len(batch)
    ids.flush()
    refuse_repeated(ids, source)


def _write_index(folder: Path, rows: Rows, num_rows: int, root: str) -> None:
    """Writes the index, after all else has reached the disk."""
    files = sorted(folder.iterdir())
    for file in files:
        sync_file(file)
    index: dict[str, Any] = {
        "format": KIND,
        "version": SHARDS_VERSION,
        "rows": num_rows,
        "columns": rows.names,
        "root": root,
        "fingerprint": fingerprint_of(lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")),
        "files": {file.name: file.stat().st_size for file in files},
    }
    write_whole(folder / INDEX, json.dumps(index, indent=1))


def _check_place(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError(f"{target}: would overwrite the table it is made from; give the output another name")
    if target.exists() and not is_shards(target):
        raise UserError(f"{target}: is there already and is no folder of shards; give the output another name")


def _put_in_place(partial: Path, target: Path) -> None:
    """Gives the complete folder its name; shards of that name make way in the moment before."""
    if target.exists():
        old = partial.with_suffix(".old")
        os.rename(target, old)
        os.rename(partial, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, target)
