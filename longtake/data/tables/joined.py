"""Columns of several tables as one column, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


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
        first = np.searchsorted(self._starts, start, side="right") - 1
        found = []
        for begin, part in zip(self._starts[first:].tolist(), self._parts[first:], strict=False):
            if begin >= stop:
                break
            found.append(part[max(0, start - begin) : stop - begin])
        return np.concatenate(found) if found else np.empty(0, self.dtype)
