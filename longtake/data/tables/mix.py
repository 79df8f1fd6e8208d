"""Several clip tables as one: their rows one after the other, each table with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.probing.folder import folder_table
from longtake.data.tables.checks import FINGERPRINTED
from longtake.data.tables.ids import repeats
from longtake.data.tables.joined import JoinedColumn
from longtake.data.tables.rows import open_rows
from longtake.data.tables.shards import is_shards
from longtake.data.tables.table import ClipTable
from longtake.random import hash64, sample_ids

_TWIN = 1 << 32  # copies of one clip are counted far below this, so a twin's id is never that of a copy


class MixedTable:
    """Clip tables with weights, read like one `ClipTable`.

    Row numbers run through the tables in their order; columns as there (numbers as `JoinedColumn`, which copies
    nothing), plus `weights`. A clip keeps the id it has in its own table, so adding a table behind, taking one away or
    changing weights leaves the others' samples as they are. Where an id has occurred in an earlier table (the same
    path listed twice), the n-th one gets another id, made of the old one and n.
    """

    def __init__(self, tables: Sequence[ClipTable], weights: Sequence[float]):
        """`weights`: of each table, at least 0 and not all 0. Raises `UserError` otherwise."""
        if not tables or len(tables) != len(weights):
            raise ValueError(f"{len(tables)} tables, {len(weights)} weights: one weight for each table is expected")
        for table, weight in zip(tables, weights, strict=True):
            if not (np.isfinite(weight) and weight >= 0):
                raise UserError(f"dataset.mix: the weight of {table.source} is {weight}; it must be at least 0")
        if not any(weights):
            raise UserError("dataset.mix: every weight is 0; give at least one table a weight above 0")
        self.tables, self.table_weights = tuple(tables), tuple(map(float, weights))
        self._starts = np.cumsum([0, *map(len, tables)])
        self.num_frames, self.height, self.width, self.fps, self.motion_score = (
            JoinedColumn([getattr(table, name) for table in tables])
            for name in ("num_frames", "height", "width", "fps", "motion_score")
        )
        self.invalid = {
            int(start) + row: reason
            for start, table in zip(self._starts, tables, strict=False)
            for row, reason in table.invalid.items()
        }

    @cached_property
    def clip_ids(self) -> np.ndarray:
        """uint64 [N], all different."""
        return _distinct([table.clip_ids for table in self.tables])

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
        """The file of a row, as a path or a URL; a relative path starts from the root of its own table."""
        table, own = self._place(row)
        return table.location(own)

    def path(self, row: int) -> Path:
        """The file of a row; a relative path starts from the root of its own table."""
        table, own = self._place(row)
        return table.path(own)

    def written_path(self, row: int) -> str:
        """The path of a row as its table has it."""
        table, own = self._place(row)
        return table.written_path(own)

    def caption(self, row: int, column: str = "text") -> str:
        """The text of a row in one of the caption columns; empty where its table has no such column."""
        table, own = self._place(row)
        return table.caption(own, column) if column in table.captions else ""

    def _place(self, row: int) -> tuple[ClipTable, int]:
        """The table of a row, and its number there."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: the tables have {len(self)} rows")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.tables[number], row - int(self._starts[number])


def open_clips(config: DatasetConfig) -> ClipTable | MixedTable:
    """What a run trains on. Raises `UserError` as `ClipTable.open` and `folder_table` do."""
    if config.mix is None:
        assert config.data_path is not None
        return _open_source(config.data_path, config)
    tables = [_open_source(path, config, lenient=True) for path, _ in config.mix]
    for column in config.captions or ():
        if not any(column in table.captions for table in tables):
            raise UserError(f"dataset.captions: no table of dataset.mix has a column {column}; leave it out")
    return MixedTable(tables, [weight for _, weight in config.mix])


def order_columns(table: ClipTable | MixedTable) -> dict[str, Any]:
    """What the order of a pass needs of a table, as arguments of `OrderInputs`; the weights are left to the caller."""
    return {name: getattr(table, name) for name in FINGERPRINTED} | {"table": table.fingerprint}


def _open_source(path: str, config: DatasetConfig, lenient: bool = False) -> ClipTable:
    """A table, or the table of a folder of clips; the paths of the latter start from that folder.

    `lenient`: the table may lack some of the caption columns.
    """
    captions, source, root = tuple(config.captions or ("text",)), Path(path), config.root
    if source.is_dir() and not is_shards(source):
        source, root = folder_table(source), source
    if lenient and config.captions is not None:
        names = open_rows(source).names
        captions = tuple(column for column in captions if column in names)
    return ClipTable.open(source, root, captions, config.memory_efficient)


def _distinct(ids: Sequence[np.ndarray]) -> np.ndarray:
    """The ids of all tables, uint64 [N]: one that has occurred n times in earlier tables is mixed with n."""
    joined = np.concatenate(ids)
    rows, ordinals = repeats(joined)
    joined[rows] = sample_ids(joined[rows], _TWIN + ordinals)
    return joined
