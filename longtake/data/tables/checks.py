"""What must hold of a clip table, however it is stored, and the fingerprint of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from longtake.contracts import UserError
from longtake.data.tables.ids import first_repeated

REQUIRED = ("path", "text", "num_frames", "height", "width", "fps")
FINGERPRINTED = ("clip_ids", "num_frames", "height", "width", "fps")


def fingerprint_of(column: Callable[[str], np.ndarray]) -> str:
    """16 hex digits over the columns `FINGERPRINTED`, uint64, int64 and float64 [N]; `column(name)` gives each."""
    digest = hashlib.blake2b(digest_size=8)
    for name in FINGERPRINTED:
        values = column(name)
        for start in range(0, len(values), 1 << 20):
            part = values[start : start + (1 << 20)]
            digest.update(np.nan_to_num(part) if name == "fps" else np.ascontiguousarray(part))
    return digest.hexdigest()


def check_columns(names: Sequence[str], source: Path, captions: Sequence[str] = ()) -> None:
    """Raises `UserError` where a table lacks a column that training reads."""
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise UserError(
            f"{source}: column {named(missing)} is missing (found {named(names)}); "
            f"`longtake data probe {source} -o {source.with_suffix('.parquet').name}` fills in "
            "num_frames, height, width and fps for a table with path and text"
        )
    for name in captions:
        if name not in names:
            raise UserError(f"dataset.captions: {source} has no column {name}; choose among its columns {named(names)}")


def refuse_repeated(ids: np.ndarray, source: Path) -> None:
    """Raises `UserError` where two rows have the same clip id."""
    if found := first_repeated(ids):
        raise UserError(
            f"{source}: rows {found[0]} and {found[1]} have the same clip_id {found[2]}; "
            "ids must differ: leave the column out to have them made from the paths"
        )


def named(names: Sequence[str]) -> str:
    """Columns as a sentence names them."""
    return ", ".join(names) if names else "no column"
