"""A clip table of any size made into a folder of shards, batch by batch; where what is made of tables and folders is
kept: beside them, or in the user's cache folder; made once a machine."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from longtake import locks
from longtake.contracts import UserError
from longtake.data.clips.locations import refuse_url
from longtake.data.tables.checks import (
    FORMAT,
    SHARDS_VERSION,
    check_columns,
    clean_numbers,
    fingerprint_of,
    no_rows,
    refuse_repeated,
)
from longtake.data.tables.ids import path_hashes
from longtake.data.tables.rows import Rows, byte_texts, id_values, open_rows
from longtake.data.tables.shards import INDEX, KIND, NUMBERS, ROWS_PER_FILE, is_shards
from longtake.data.tables.write_rows import moved_batch
from longtake.durable import sync_file, unfinished_folder, write_whole
from longtake.random import hash64
from longtake.small_files import cache_folder

LARGE_BYTES = 256 << 20  # a table file above this is converted to shards without being asked for
_NPY_HEADER_BYTES = 128  # of a file whose length is not known before it is written
_INVALID = pa.schema(
    [("row", pa.int64()), ("reason", pa.string()), ("unreadable", pa.bool_())],
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
    source: Path, target: Path, *, root: Path | str | None = None, progress: Callable[[int], None] | None = None
) -> Converted:
    """Write the table `source` as a folder of shards `target`, which is complete or absent; memory stays bounded.

    Relative paths are rewritten to start from the folder that `target` lies in; with `root` they stay as they are and
    start there. Clip ids stay: the table's own, or those its paths give where it lies now. A folder of shards at
    `target` is replaced once the new one is complete. `progress(rows)` is called after each batch. Raises `UserError`
    as `ClipTable.open` does.
    """
    rows = open_rows(source, texts=None)
    check_columns(rows.names, source)
    _check_place(source, target)
    with unfinished_folder(target) as partial:
        num_rows, num_invalid = _write_columns(partial, rows, target.parent if root is None else None, progress)
        if not num_rows:
            raise no_rows(source)
        _complete_ids(partial, rows)
        start = root if isinstance(root, str) else os.pardir if root is None else str(root.absolute())
        _write_index(partial, rows, num_rows, start)
        num_bytes = sum(file.stat().st_size for file in partial.iterdir())
    return Converted(target, num_rows, num_invalid, num_bytes)


def _write_columns(
    folder: Path, rows: Rows, start: Path | None, progress: Callable[[int], None] | None
) -> tuple[int, int]:
    """Write Arrow and number files, ids not yet told apart, paths as seen from `start`: (rows, invalid rows)."""
    num_rows = num_invalid = 0
    schema = rows.schema.with_metadata(FORMAT)
    with ExitStack() as stack:
        numbers = {name: _NumberFile(stack.enter_context(open(folder / f"{name}.npy", "wb"))) for name in NUMBERS}
        invalid = stack.enter_context(pa.ipc.new_file(str(folder / "invalid.arrow"), _INVALID))
        writer = None
        for chunk in rows.chunks():
            if chunk.first % ROWS_PER_FILE == 0:
                if writer is not None:
                    writer.close()
                writer = pa.ipc.new_file(str(folder / f"{chunk.first // ROWS_PER_FILE:05d}.arrow"), schema)
                stack.callback(writer.close)
            batch = chunk.batch if start is None else moved_batch(chunk.batch, rows.folder, start)
            writer.write_batch(batch.replace_schema_metadata(FORMAT))
            found, wrong = clean_numbers(chunk.batch, chunk.unreadable, chunk.first)
            wrong = rows.with_lines(wrong)
            if "clip_id" in rows.names:
                found["clip_ids"] = id_values(chunk.batch.column("clip_id"), rows.source, chunk.first, chunk.unreadable)
            else:
                found["clip_ids"] = path_hashes(byte_texts(chunk.batch.column("path")))
            for name, values in found.items():
                numbers[name].append(values)
            if wrong:
                unreadable = [row in chunk.unreadable for row in wrong]
                invalid.write_batch(pa.record_batch([list(wrong), list(wrong.values()), unreadable], schema=_INVALID))
            num_rows, num_invalid = chunk.end, num_invalid + len(wrong)
            if progress:
                progress(num_rows)
        for number in numbers.values():
            number.finish()
    for name, number in numbers.items():
        if not number.count:
            (folder / f"{name}.npy").unlink()
    return num_rows, num_invalid


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


def _complete_ids(folder: Path, rows: Rows) -> None:
    """Tells rows of the same path apart by their ordinals, and refuses ids that are equal all the same."""
    ids = np.load(folder / "clip_ids.npy", mmap_mode="r+")
    if "clip_id" not in rows.names:
        rows.tell_apart(ids)
        ids.flush()
    refuse_repeated(ids, rows.source)


def _write_index(folder: Path, rows: Rows, num_rows: int, root: str) -> None:
    """Write the index, after all else has reached the disk."""
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
        raise UserError(f"{target}: is there already and is not a folder of shards; give the output another name")


def is_large(source: Path) -> bool:
    """Whether a table is so large that a run should not hold its texts in memory."""
    return source.is_file() and source.stat().st_size > LARGE_BYTES


def cached_shards(source: Path, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of shards of a table file, converted if that has not been done since the file last changed.
    `root`: where its paths start, if given, which makes no difference to the shards.

    It lies beside the file as `.<name>.<key>.shards`, or in the user's cache folder where that cannot be written; the
    key is made of the file's size and time. One process of a machine converts, the others wait. Shards of
    an earlier state of the file are removed when no process reads them any more. Raises `UserError` as `make_shards`.
    """
    if not source.is_file():
        refuse_url(source)
        raise UserError(f"{source}: no such file; give a clip table as .csv, .parquet, .arrow, .json or .jsonl")
    name, key = f".{source.name}.", _key(source)
    for folder in (source.absolute().parent, user_cache(source)):
        if is_shards(folder / f"{name}{key}.shards"):
            return folder / f"{name}{key}.shards"
    folder = writable_folder(source.absolute().parent, user_cache(source))
    target = folder / f"{name}{key}.shards"
    with lock(folder / f"{name}lock") as alone:
        if is_shards(target):
            return target
        print(f"{source}: converting it to shards, once, in {target}", file=sys.stderr, flush=True)
        if alone:
            for left in folder.glob(f"{glob.escape(f'.{name}')}*.partial"):  # of a conversion that was killed
                shutil.rmtree(left, ignore_errors=True)
        try:
            check_columns(open_rows(source).names, source, root=root)
            make_shards(source, target, root=source.absolute().parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and is_shards(target):
                return target  # another machine was faster
            raise
        if alone:
            _remove_earlier(folder, name, target)
    return target


def user_cache(source: Path) -> Path:
    """Return the folder for what belongs to one table or folder, under `XDG_CACHE_HOME` or `~/.cache`; not made yet."""
    digest = hashlib.blake2b(os.fsencode(source.absolute()), digest_size=8).hexdigest()
    return cache_folder() / "tables" / digest


def writable_folder(first: Path, second: Path) -> Path:
    """`first` where this process may write there, else `second`, which is made."""
    if os.access(first, os.W_OK | os.X_OK):
        return first
    second.mkdir(parents=True, exist_ok=True)
    return second


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold a lock file while the body runs; False where the file system has no locks, and nobody is kept out."""
    with open(path, "a") as file:
        try:
            locks.flock(file, locks.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _key(source: Path) -> str:
    """16 hex digits that change with the file."""
    stat = source.stat()
    return f"{hash64(stat.st_size, stat.st_mtime_ns):016x}"


def _remove_earlier(folder: Path, name: str, target: Path) -> None:
    """Remove the shards of earlier states of a table; those that a process has open are left for next time."""
    for old in folder.glob(f"{glob.escape(name)}*.shards"):
        if old == target or not is_shards(old):
            continue
        with suppress(OSError), open(old / INDEX) as index:
            locks.flock(index, locks.LOCK_EX | locks.LOCK_NB)  # readers hold it shared
            shutil.rmtree(old, ignore_errors=True)
