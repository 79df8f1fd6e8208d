"""Several clip tables as one: their rows one after the other, each table with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longtake.buckets.kept_orders import WORTH_KEEPING
from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.probing.embedded import embedded_table, is_embedded
from longtake.data.probing.folder import folder_table
from longtake.data.probing.metadata import is_metadata, metadata_table
from longtake.data.tables.checks import FINGERPRINTED
from longtake.data.tables.ids import REPEATS, rename_repeats
from longtake.data.tables.rows import open_rows
from longtake.data.tables.shards import is_shards
from longtake.data.tables.table import ClipTable, base_folder
from longtake.random import hash64


class JoinedColumn:
    """One-dimensional arrays end to end, read like one array: by row, by slice or by an array of rows.

    What is read is copied, the whole stays where it is, so memory-mapped parts stay shared between processes.
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        """`parts`: at least one, all of one kind or of kinds that NumPy joins."""
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *map(len, parts)])
        self.dtype = np.result_type(*parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a joined column can only be copied into one array")
        return np.concatenate(self._parts).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, rows: int | slice | np.ndarray) -> Any:
        if isinstance(rows, slice):
            return self._slice(rows)
        rows = np.asarray(rows)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if rows.size and not (rows.min() >= -len(self) and rows.max() < len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()}: the tables have {len(self)}")
        rows = np.where(rows < 0, rows + len(self), rows).astype(np.int64)
        places = np.searchsorted(self._starts, rows, side="right") - 1
        if not rows.ndim:
            return self._parts[places][rows - self._starts[places]]
        out = np.empty(rows.shape, self.dtype)
        for place in np.unique(places):
            here = places == place
            out[here] = self._parts[place][rows[here] - self._starts[place]]
        return out

    def _slice(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self[np.arange(start, stop, step)]
        begins = self._starts[:-1].tolist()
        parts = zip(begins, self._parts, strict=True)
        return np.concatenate([part[max(0, start - begin) : max(0, stop - begin)] for begin, part in parts])


class MixedTable:
    """Clip tables with weights, read like one `ClipTable`.

    Row numbers run through the tables in their order; columns as there (numbers as `JoinedColumn`, which copies
    nothing), plus `weights`. A clip keeps the id it has in its own table, so adding a table behind, taking one away or
    changing weights leaves the others' samples as they are. Where an id has occurred in an earlier table (the same
    path listed twice), the n-th one gets another id, made of the old one and n.
    """

    def __init__(self, tables: Sequence[ClipTable], weights: Sequence[float]):
        """`weights`: of each table, at least 0 and not all 0."""
        self.tables, self.table_weights = tuple(tables), tuple(map(float, weights))
        self._starts = np.cumsum([0, *map(len, tables)])
        self.num_frames, self.height, self.width, self.fps, self.motion_score, self.uneven_times = (
            JoinedColumn([getattr(table, name) for table in tables])
            for name in ("num_frames", "height", "width", "fps", "motion_score", "uneven_times")
        )
        self.invalid = {
            int(start) + row: reason
            for start, table in zip(self._starts, tables, strict=False)
            for row, reason in table.invalid.items()
        }

    @cached_property
    def clip_ids(self) -> np.ndarray:
        """uint64 [N], all different."""
        ids = np.concatenate([table.clip_ids for table in self.tables])
        kept = self.source.with_name(f".{self.source.name}.{self.fingerprint}{REPEATS}")
        rename_repeats(ids, kept if len(ids) >= WORTH_KEEPING else None)
        return ids

    @cached_property
    def weights(self) -> np.ndarray:
        """Expected copies of each clip in a pass: float32 [N]."""
        return np.repeat(np.array(self.table_weights, np.float32), [len(table) for table in self.tables])

    @property
    def source(self) -> Path:
        """The first table's file, for messages about the whole."""
        return self.tables[0].source

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over the tables and their order; weights are not part of it."""
        return f"{hash64(*(table.fingerprint for table in self.tables)):016x}"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple:
        return MixedTable, (self.tables, self.table_weights)

    def location(self, row: int) -> str:
        """Return the file of a row, as a path or a URL; a relative path starts from the root of its own table."""
        return self.location_of(row, self.written_path(row))

    def location_of(self, row: int, path: str) -> str:
        """Another file that a row names, as `location` gives its own."""
        table, own = self._place(row)
        return table.location_of(own, path)

    def written_path(self, row: int) -> str:
        """Return the path of a row as its table has it."""
        table, own = self._place(row)
        return table.written_path(own)

    def caption(self, row: int, column: str = "text") -> str:
        """Return the text of a row in one of the caption columns; empty where its table has no such column."""
        table, own = self._place(row)
        return table.caption(own, column) if column in table.captions else ""

    def number_of(self, row: int) -> int:
        """Which of the tables a row is of."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: the tables have {len(self)} rows")
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _place(self, row: int) -> tuple[ClipTable, int]:
        """Return the table of a row, and its number there."""
        number = self.number_of(row)
        return self.tables[number], row - int(self._starts[number])


def open_clips(config: DatasetConfig, columns: Sequence[str] = ()) -> ClipTable | MixedTable:
    """What a run trains on. Raises `UserError` as `ClipTable.open` and `folder_table` do.

    `columns`: others that hold text and are read, beside the captions; a table of a mix may lack them.
    """
    if config.mix is None:
        if config.data_path is None:
            raise UserError("dataset.data_path = None: no clip table is named; add --dataset.data-path clips.parquet")
        return _open_source(config.data_path, config, columns)
    tables = [_open_source(path, config, columns, lenient=True) for path, _ in config.mix]
    for column in config.captions or ():
        if not any(column in table.captions for table in tables):
            raise UserError(f"dataset.captions: no table of dataset.mix has a column {column}; leave it out")
    return MixedTable(tables, [weight for _, weight in config.mix])


def order_columns(table: ClipTable | MixedTable) -> dict[str, Any]:
    """What the order of a pass needs of a table, as arguments of `OrderInputs`; the weights are left to the caller."""
    return {name: getattr(table, name) for name in FINGERPRINTED} | {"table": table.fingerprint}


def clip_weights(
    config: DatasetConfig, num_frames: np.ndarray | JoinedColumn, weights: float | np.ndarray = 1.0
) -> float | np.ndarray:
    """Expected copies of each clip in a pass: `weights`, those of a mix, times `video_repeat` for videos."""
    if config.video_repeat <= 1:
        return weights
    return weights * np.where(np.asarray(num_frames) > 1, np.float32(config.video_repeat), np.float32(1))


def table_and_root(source: Path, root: str | Path | None) -> tuple[Path, str | Path | None]:
    """Return a table and where its paths start, as they are; of a folder of clips its table, whose paths start
    there, and of a list with `file_path`, or of embedded clips, the table that is kept beside it."""
    if source.is_dir() and not is_shards(source):
        return folder_table(source), source
    if is_metadata(source):
        return metadata_table(source, root), base_folder(source, root)
    if is_embedded(source):
        return embedded_table(source, root), base_folder(source, root)
    return source, root


def _open_source(path: str, config: DatasetConfig, columns: Sequence[str], lenient: bool = False) -> ClipTable:
    """Return a table, or that of a folder of clips, whose paths start there; `lenient`: caption columns may
    be missing."""
    captions = tuple(config.captions or ("text",))
    source, root = table_and_root(Path(path), config.root)
    names = open_rows(source).names if columns or (lenient and config.captions is not None) else ()
    if lenient:
        captions = tuple(column for column in captions if config.captions is None or column in names)
        columns = [column for column in columns if column in names]
    for column in columns:
        if column not in names:
            raise UserError(
                f"{source}: has no column {column}, from which the model reads what a clip brings along; add it, in a "
                f"list of file_path as {column}_file_path (found {', '.join(names)})"
            )
    return ClipTable.open(source, root, (*captions, *columns), config.memory_efficient)
