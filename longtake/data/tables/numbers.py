"""The numeric columns of a clip table: made whole numbers and rates, and the rows in which they make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.tables.checks import check_columns
from longtake.data.tables.rows import open_rows

SCORE = "score_vmafmotion"
_LARGEST = 2**31  # more frames or pixels a side than any clip has: a larger number is a slip


def clean_numbers(
    columns: pa.Table | pa.RecordBatch, source: Path, first_row: int = 0
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """The numbers of some rows, and the reason for each row (counted from `first_row`) whose numbers make no sense.

    `num_frames`, `height`, `width`: int64 [N], 0 in such a row; `fps`: float64 [N], NaN where unknown;
    `motion_score`: the same, only where the table has the column. Raises `UserError` for text among the numbers.
    """
    found = {name: _floats(columns, name, source, first_row) for name in ("num_frames", "height", "width", "fps")}
    invalid: dict[int, str] = {}
    for name in ("num_frames", "height", "width"):
        bad = ~((found[name] >= 1) & (found[name] < _LARGEST)) | (found[name] % 1 != 0)
        _note(invalid, bad, name, found[name], "a whole number from 1")
    fps = found["fps"]
    _note(invalid, np.isinf(fps) | (fps < 0), "fps", fps, "0 or more, or empty where unknown")
    empty = pc.equal(pc.fill_null(columns["path"], ""), "")
    for row in np.flatnonzero(empty.to_numpy(zero_copy_only=False)).tolist():
        invalid[row] = "path is empty"
    wrong = np.fromiter(invalid, dtype=np.int64, count=len(invalid))
    for name in ("num_frames", "height", "width"):
        found[name][wrong] = 0
        found[name] = found[name].astype(np.int64)
    if SCORE in columns.schema.names:
        found["motion_score"] = _floats(columns, SCORE, source, first_row)
    return found, {first_row + row: reason for row, reason in invalid.items()}


def read_numbers(source: Path) -> dict[str, np.ndarray]:
    """The numbers of a whole table, and `clip_ids`, uint64 [N]: about 50 bytes a row, and none of its texts.

    Raises `UserError` as `open_rows`, `check_columns` and `clean_numbers` do.
    """
    rows = open_rows(source)
    check_columns(rows.names, source)
    found, start = [], 0
    wanted = [name for name in ("path", "num_frames", "height", "width", "fps", SCORE) if name in rows.names]
    for batch in rows.batches(wanted):
        found.append(clean_numbers(batch, rows.source, start)[0])
        start += len(batch)
    if not found:
        raise UserError(f"{rows.source}: the table has no rows; list one clip a row with its path and text")
    joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    return joined | {"clip_ids": rows.ids()}


def _note(invalid: dict[int, str], bad: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    for row in np.flatnonzero(bad).tolist():
        found = "empty" if np.isnan(values[row]) else f"{values[row]:g}"
        invalid.setdefault(row, f"{name} is {found}, expected {rule}")


def _floats(columns: pa.Table | pa.RecordBatch, name: str, source: Path, first_row: int) -> np.ndarray:
    """A numeric column as float64, NaN where empty. Raises `UserError` naming the first cell that is no number."""
    column = columns[name]
    try:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            trimmed = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, trimmed.type), trimmed)
        values = pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan"))
        return np.array(values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row, value = next(_texts(column), (0, column[0].as_py()))
        raise UserError(
            f"{source}: {name} of row {first_row + row} is {value!r}; the column must hold numbers"
        ) from error


def _texts(column: pa.Array | pa.ChunkedArray) -> Iterator[tuple[int, object]]:
    """The cells that are no numbers, with their rows."""
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value if value is not None else 0)
        except (TypeError, ValueError):
            yield row, value
