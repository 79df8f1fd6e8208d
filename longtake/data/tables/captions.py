"""How many clips of a table have no caption, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from longtake.data.tables.table import ClipTable

_PROBED = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "duration", "codec", "clip_id")
_OTHERS = frozenset((*_PROBED, "path", "text", "score_vmafmotion"))  # columns to look for no captions in
_LIKELY = ("caption", "text", "prompt", "description", "title")  # parts of the names of columns with captions


def told_captions(tables: Sequence[ClipTable], captions: Mapping[str, float] | None) -> str:
    """A line for the report before the first step: the caption columns, and how many clips have no caption in any.

    `tables`: all that a run trains on; `captions`: `dataset.captions`. Where clips have none, the line is a warning,
    and says what to do if others of the tables' columns might hold them.
    """
    columns = tuple(captions or ("text",))
    count = sum(each.count_empty([name for name in columns if name in each.captions]) for each in tables)
    names = list(dict.fromkeys(name for each in tables for name in each.names if name not in columns))
    said = f"captions: column {', '.join(columns)}, empty for {count:,} of {sum(map(len, tables)):,} clips"
    return f"warning: {said}{remedy(names)}" if count else said


def probe_warning(columns: pa.Table, source: object) -> str | None:
    """What to say before a table is probed whose clips have no captions, or some of them; None where all have."""
    names = columns.column_names
    if "text" not in names:
        found = ", ".join(names)
        return f"{source}: there is no column text (found {found}), so no clip has a caption{remedy(names, add=True)}"
    count = int(are_empty(columns["text"]).sum())
    return f"{source}: text is empty for {count:,} of {len(columns):,} clips{remedy(names)}" if count else None


def remedy(names: Sequence[str], add: bool = False) -> str:
    """`; what to do`, where one of the columns might hold captions, or (`add`) one must be added; else nothing."""
    others = [name for name in names if name not in _OTHERS]
    likely = [name for name in others if any(part in name.lower() for part in _LIKELY)]
    if not others:
        return "; add a column text if the model is to learn from captions" if add else ""
    example = likely[0] if likely else others[0]
    key = example if example.isidentifier() else f"'\"{example}\"'"
    return (
        f"; if another column holds the captions ({', '.join(others)}), rename it to text, or train with "
        f"dataset.captions, such as --dataset.captions.{key} 1"
    )


def are_empty(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Which cells of a column of texts hold none: bool [N]. Reads lengths, not texts."""
    if pa.types.is_null(column.type):
        return np.ones(len(column), bool)
    return (np.asarray(pc.fill_null(pc.binary_length(column), 0)) == 0).astype(bool)
