"""A clip table as a folder of shards: numbers in memory-mapped `.npy` files, all columns in Arrow files.

    index.json       format and version, rows, files, columns, where relative paths start, fingerprint; written last
    num_frames.npy height.npy width.npy (int64)   fps.npy motion_score.npy uneven_times.npy (float64)
    clip_ids.npy     (uint64)
    invalid.arrow    row (int64) and reason of the rows that cannot be used; whether that is a cell not readable
    00000.arrow ...  the table's columns, up to 2^20 rows a file in batches of 2^16

`motion_score.npy` and `uneven_times.npy` are there only where the table has these columns. What has been read of the
files is kept by the operating system, once for all processes of a machine.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake import locks
from longtake.contracts import UserError
from longtake.data.clips.locations import is_url
from longtake.data.tables.cells import holds_json, plain_schema, readable_cells
from longtake.data.tables.checks import SHARDS_VERSION, check_version, readable
from longtake.small_files import check_kinds, read_object

INDEX = "index.json"
KIND = "longtake shards"
OPTIONAL = ("motion_score", "uneven_times")
NUMBERS = ("num_frames", "height", "width", "fps", *OPTIONAL, "clip_ids")
ROWS_PER_BATCH = 1 << 16
ROWS_PER_FILE = 1 << 20
AGAIN = "write the shards again"


def is_shards(path: Path) -> bool:
    """Whether `path` is a folder of shards, complete or of another version, or the index of one."""
    index = path / INDEX if path.is_dir() else path
    if index.name != INDEX or not index.is_file():
        return False
    try:
        return read_object(index, {}, "")["format"] == KIND
    except (UserError, OSError, KeyError):
        return False


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a folder of shards. Raises `UserError` for a newer version and for files that are missing."""
    index = read_object(folder / INDEX, {"format": str}, AGAIN)
    check_version(index.get("version"), SHARDS_VERSION, folder / INDEX)
    kinds = {"rows": int, "columns": list, "root": str, "fingerprint": str, "files": dict}
    check_kinds(folder / INDEX, index, kinds, AGAIN)
    if not shard_files(folder, index) or not all(isinstance(name, str) for name in index["columns"]):
        raise UserError(f"{folder / INDEX}: names no files with rows, or columns that are not names; {AGAIN}")
    for name, size in index["files"].items():
        file = folder / Path(name).name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            there = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(f"{folder}: its file {name} {there}; {AGAIN}")
    return index


def shard_files(folder: Path, index: dict[str, Any]) -> list[Path]:
    """Return the Arrow files that hold the columns, in order."""
    return [folder / name for name in sorted(index["files"]) if name[:-6].isdecimal() and name.endswith(".arrow")]


def shards_root(folder: Path, index: dict[str, Any]) -> Path | str:
    """Where relative paths of a folder of shards start: a folder or a URL."""
    return index["root"] if is_url(index["root"]) else Path(os.path.normpath(folder / index["root"]))


def invalid_rows(folder: Path, only_unreadable: bool = False) -> dict[int, str]:
    """Return the rows that cannot be used, ascending, each with the reason; `only_unreadable`: not for their
    numbers."""
    file = folder / "invalid.arrow"
    with readable(file), pa.OSFile(str(file)) as opened, pa.ipc.open_file(opened) as reader:
        table = reader.read_all()
        table.validate(full=True)
        if only_unreadable:
            table = table.filter(table["unreadable"])
        return dict(zip(table["row"].to_pylist(), table["reason"].to_pylist(), strict=True))


class TableShards:
    """An open folder of shards.

    Numbers are memory-mapped arrays. A text is read by its position from the system's cache of the file, not through
    a map of its own: a page of a map counts as memory of the process, a megabyte of it for each text read at random.
    So the memory of the process stays the same however many rows it has read.
    """

    def __init__(self, folder: Path):
        """Raise `UserError` as `read_index` does."""
        self.folder, self.index = folder, read_index(folder)
        self.names: list[str] = self.index["columns"]
        self.root = shards_root(folder, self.index)  # where relative paths start: a folder or a URL
        self._in_use = open(folder / INDEX, "rb")  # noqa: SIM115 - locked while this object lives
        with suppress(OSError):  # some network file systems have no locks
            locks.flock(self._in_use, locks.LOCK_SH | locks.LOCK_NB)
        self.numbers = {
            name: mapped_array(folder / f"{name}.npy", len(self))
            for name in NUMBERS
            if name not in OPTIONAL or f"{name}.npy" in self.index["files"]
        }
        self._files = [open(file, "rb", buffering=0) for file in shard_files(folder, self.index)]  # noqa: SIM115
        self._columns: dict[str, list[_Texts | _HeldTexts]] = {}

    def __len__(self) -> int:
        return self.index["rows"]

    def open_texts(self, names: Iterable[str]) -> dict[int, str]:
        """Find where these columns lie, and the rows with a value that is not one text, each with the reason.

        Raises `UserError` for a column of numbers.
        """
        wanted, wrong, first = list(dict.fromkeys(names)), dict[int, str](), 0
        self._columns = {name: [] for name in wanted}
        for file in self._files:
            buffer = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            with readable(Path(file.name)), pa.ipc.open_file(pa.BufferReader(buffer)) as reader:
                schema = plain_schema(reader.schema, self.folder, wanted)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    batch.validate()
                    for name in wanted:
                        field = reader.schema.field(name)
                        if (pa.types.is_string(field.type) or pa.types.is_null(field.type)) and not holds_json(field):
                            self._columns[name].append(_Texts.of(file, batch.column(name), buffer.address))
                            continue
                        cells, lost = readable_cells(batch.select([name]), pa.schema([schema.field(name)]), wanted)
                        texts = without_numbers(cells.column(0), name, self.folder)
                        self._columns[name].append(_HeldTexts(texts))
                        wrong.update({first + row: why for row, why in lost.items()})
                    first += len(batch)
        if first != len(self):
            raise UserError(f"{self.folder}: its files do not hold {len(self)} rows; {AGAIN}")
        return wrong

    def text(self, name: str, row: int) -> str:
        """Return the cell of a column of texts that `open_texts` has found; empty where the table has none."""
        batch, place = divmod(row if row >= 0 else row + len(self), ROWS_PER_BATCH)
        return self._columns[name][batch].read(place)

    def find_empty(self, names: Sequence[str], most: int) -> tuple[int, list[int]]:
        """How many rows have no text in any of these columns, and the first `most` of them.

        Reads their lengths, 4 bytes a row, from each file.
        """
        count, start, first, number_of_batch = 0, 0, [], 0
        for file in shard_files(self.folder, self.index):
            with readable(file), pa.memory_map(str(file)) as mapped, pa.ipc.open_file(mapped) as reader:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    texts = [self._columns[name][number_of_batch].texts or batch.column(name) for name in names]
                    empty = np.logical_and.reduce([are_empty(cells) for cells in texts])
                    number_of_batch += 1
                    count += int(empty.sum())
                    first += (start + np.flatnonzero(empty)[: most - len(first)]).tolist() if len(first) < most else []
                    start += len(batch)
        return count, first


@dataclass(frozen=True, slots=True)
class _HeldTexts:
    """The texts of one column of one batch that has them as values of other kinds."""

    texts: pa.StringArray

    def read(self, row: int) -> str:
        """Return the text of a row; empty where there is none."""
        return self.texts[row].as_py() or ""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Where the texts of one column of one batch lie in a file: Arrow's validity bits, 32-bit offsets, and bytes."""

    file: BinaryIO
    rows: int
    validity: int | None  # position of the bits; None: every text is there
    offsets: int | None  # None: no text is there
    data: int
    num_bytes: int  # of all texts
    texts: None = None  # they are not in memory

    @classmethod
    def of(cls, file: BinaryIO, column: pa.Array, base: int) -> _Texts:
        """Return the positions of a column that lies in memory at `base` as in the file."""
        rows = len(column)
        if pa.types.is_null(column.type) or column.null_count == rows:
            return cls(file, rows, None, None, 0, 0)
        assert column.offset == 0
        buffers = column.buffers()
        validity, offsets, data = (None if part is None else part.address - base for part in buffers)
        size = len(buffers[2]) if buffers[2] is not None else 0
        return cls(file, rows, validity if column.null_count else None, offsets, data or 0, size)

    def read(self, row: int) -> str:
        """Raise `UserError` where the file is damaged."""
        if self.offsets is None:
            return ""
        file = self.file.fileno()
        if self.validity is not None and not os.pread(file, 1, self.validity + row // 8)[0] >> row % 8 & 1:
            return ""
        start, end = _TWO_OFFSETS.unpack(os.pread(file, 8, self.offsets + 4 * row))
        try:
            if not 0 <= start <= end <= self.num_bytes:
                raise ValueError(f"its offsets are {start} and {end}")
            return os.pread(file, end - start, self.data + start).decode()
        except ValueError as error:
            raise UserError(f"{self.file.name}: is damaged (a text of row {row}: {error}); {AGAIN}") from error


_TWO_OFFSETS = struct.Struct("<ii")
_KINDS = {
    "fps": "<f8",
    "motion_score": "<f8",
    "uneven_times": "<f8",
    "clip_ids": "<u8",
}  # of the files of numbers; others "<i8"


def mapped_array(file: Path, rows: int) -> np.ndarray:
    """Return a one-dimensional `.npy` as a read-only array over its map. Raises `UserError` where it is another one."""
    with readable(file), suppress(ValueError):  # of another kind of file
        found = np.lib.format.open_memmap(file, mode="r")
        if (found.dtype.str, found.shape) == (_KINDS.get(file.stem, "<i8"), (rows,)):
            return np.asarray(found)
    raise UserError(f"{file}: is damaged (its head is not that of {rows} numbers); {AGAIN}")


def without_numbers(column: Any, name: str, source: Path) -> Any:
    """Return a column of captions; one of NaN alone, as pandas writes where no row has a text, has empty cells. Raises
    `UserError` for one of numbers."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_null(kind):
        return column
    if pa.types.is_floating(kind) and pc.all(pc.is_null(column, nan_is_null=True)).as_py():
        nothing = pa.nulls(len(column), pa.string())
        return nothing if isinstance(column, pa.Array) else pa.chunked_array([nothing])
    raise UserError(f"{source}: column {name} holds {kind}; it must hold text")


def are_empty(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Which cells of a column of texts hold none: bool [N]. Reads lengths, not texts."""
    if pa.types.is_null(column.type):
        return np.ones(len(column), bool)
    return (np.asarray(pc.fill_null(pc.binary_length(column), 0)) == 0).astype(bool)
