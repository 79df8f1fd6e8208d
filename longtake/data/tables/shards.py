"""A clip table as a folder of shards: numbers in memory-mapped `.npy` files, all columns in Arrow files.

    index.json       format and version, rows, files, columns, where relative paths start, fingerprint; written last
    num_frames.npy height.npy width.npy (int64)   fps.npy motion_score.npy (float64)   clip_ids.npy (uint64)
    invalid.arrow    row (int64) and reason of the rows whose numbers make no sense
    00000.arrow ...  the table's columns, up to 2^20 rows a file in batches of 2^16

`motion_score.npy` is there only where the table has scores. What has been read of the files is kept by the operating
system, once for all processes of a machine.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.clips.remote import is_url
from longtake.data.formats import SHARDS_VERSION, check_version
from longtake.data.tables.captions import are_empty

INDEX = "index.json"
KIND = "longtake shards"
NUMBERS = ("num_frames", "height", "width", "fps", "motion_score", "clip_ids")
ROWS_PER_BATCH = 1 << 16
ROWS_PER_FILE = 1 << 20


def is_shards(path: Path) -> bool:
    """Whether `path` is a folder of shards, complete or of another version, or the index of one."""
    index = path / INDEX if path.is_dir() else path
    if index.name != INDEX or not index.is_file():
        return False
    try:
        found = json.loads(index.read_bytes())
    except (ValueError, OSError):
        return False
    return isinstance(found, dict) and found.get("format") == KIND


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of shards. Raises `UserError` for a newer version and for files that are missing."""
    index = json.loads((folder / INDEX).read_bytes())
    check_version(index.get("version"), SHARDS_VERSION, folder / INDEX)
    for name, size in index["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            there = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(f"{folder}: its file {name} {there}; write the shards again")
    return index


def shard_files(folder: Path, index: dict[str, Any]) -> list[Path]:
    """The Arrow files that hold the columns, in order."""
    return [folder / name for name in sorted(index["files"]) if name[:-6].isdecimal() and name.endswith(".arrow")]


def shards_root(folder: Path, index: dict[str, Any]) -> Path | str:
    """Where relative paths of a folder of shards start: a folder or a URL."""
    return index["root"] if is_url(index["root"]) else Path(os.path.normpath(folder / index["root"]))


class Shards:
    """An open folder of shards.

    Numbers are memory-mapped arrays. A text is read by its position from the system's cache of the file, not through
    a map of its own: a page of a map counts as memory of the process, a megabyte of it for each text read at random.
    So the memory of the process stays the same however many rows it has read.
    """

    def __init__(self, folder: Path):
        """Raises `UserError` as `read_index` does."""
        self.folder, self.index = folder, read_index(folder)
        self._in_use = open(folder / INDEX, "rb")  # noqa: SIM115 - locked while this object lives
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.numbers = {
            name: _mapped_array(folder / f"{name}.npy") for name in NUMBERS if f"{name}.npy" in self.index["files"]
        }
        self._files = [open(file, "rb", buffering=0) for file in shard_files(folder, self.index)]  # noqa: SIM115
        self._columns: dict[str, list[_Texts]] = {}

    def __len__(self) -> int:
        return self.index["rows"]

    @property
    def names(self) -> list[str]:
        """The table's columns."""
        return list(self.index["columns"])

    @property
    def root(self) -> Path | str:
        """Where relative paths start: a folder or a URL."""
        return shards_root(self.folder, self.index)

    def invalid(self) -> dict[int, str]:
        """The rows whose numbers make no sense, each with the reason."""
        with pa.OSFile(str(self.folder / "invalid.arrow")) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        return dict(zip(table["row"].to_pylist(), table["reason"].to_pylist(), strict=True))

    def open_texts(self, names: Iterable[str]) -> None:
        """Finds where these columns lie. Raises `UserError` where one holds something other than texts."""
        wanted = list(dict.fromkeys(names))
        self._columns = {name: [] for name in wanted}
        for file in self._files:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._find_texts(file.fileno(), mapped, wanted)

    def text(self, name: str, row: int) -> str:
        """The cell of a column of texts that `open_texts` has found; empty where the table has none."""
        batch, place = divmod(row if row >= 0 else row + len(self), ROWS_PER_BATCH)
        return self._columns[name][batch].read(place)

    def count_empty(self, names: Sequence[str]) -> int:
        """How many rows have no text in any of these columns. Reads their lengths, 4 bytes a row, from each file."""
        count = 0
        for file in shard_files(self.folder, self.index):
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_file(mapped) as reader:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    count += int(np.logical_and.reduce([are_empty(batch.column(name)) for name in names]).sum())
        return count

    def _find_texts(self, file: int, mapped: mmap.mmap, names: Sequence[str]) -> None:
        buffer = pa.py_buffer(mapped)
        with pa.ipc.open_file(pa.BufferReader(buffer)) as reader:
            for name in names:
                kind = reader.schema.field(name).type
                if not (pa.types.is_string(kind) or pa.types.is_null(kind)):
                    raise UserError(f"{self.folder}: column {name} holds {kind}; it must hold text")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                for name in names:
                    self._columns[name].append(_Texts.of(file, batch.column(name), buffer.address))


@dataclass(frozen=True, slots=True)
class _Texts:
    """Where the texts of one column of one batch lie in a file: Arrow's validity bits, 32-bit offsets, and bytes."""

    file: int
    validity: int | None  # position of the bits; None: every text is there
    offsets: int | None  # None: no text is there
    data: int

    @classmethod
    def of(cls, file: int, column: pa.Array, base: int) -> _Texts:
        """The positions of a column that lies in memory at `base` as in the file."""
        if pa.types.is_null(column.type) or column.null_count == len(column):
            return cls(file, None, None, 0)
        assert column.offset == 0
        validity, offsets, data = (None if part is None else part.address - base for part in column.buffers())
        return cls(file, validity if column.null_count else None, offsets, data or 0)

    def read(self, row: int) -> str:
        if self.offsets is None:
            return ""
        if self.validity is not None and not os.pread(self.file, 1, self.validity + row // 8)[0] >> row % 8 & 1:
            return ""
        start, end = _TWO_OFFSETS.unpack(os.pread(self.file, 8, self.offsets + 4 * row))
        return os.pread(self.file, end - start, self.data + start).decode()


_TWO_OFFSETS = struct.Struct("<ii")


def _mapped_array(file: Path) -> np.ndarray:
    """A one-dimensional `.npy` as a read-only array over its map."""
    with open(file, "rb") as opened:
        np.lib.format.read_magic(opened)
        shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype, shape[0], opened.tell())
