"""How a probed table is put together from the source's columns and the files' answers, and the list of bad rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.data.probing.one_file import ClipInfo
from longtake.data.tables.write_rows import write_table


class Answers:
    """What is known of each row so far, as arrays: 50 bytes a row, however many rows there are."""

    def __init__(self, num_rows: int):
        """`num_rows`: rows that will be answered, all open at first."""
        self.num_frames, self.height, self.width = (np.zeros(num_rows, np.int64) for _ in range(3))
        self.fps, self.duration = (np.full(num_rows, math.nan) for _ in range(2))
        self._codec = np.zeros(num_rows, np.int16)
        self._codecs: list[str] = []
        self.reasons: dict[int, str] = {}  # of the rows that cannot be used

    def set(self, row: int, answer: ClipInfo | str) -> None:
        """Notes a row's info, or the reason why it cannot be used."""
        if isinstance(answer, str):
            self.reasons[row] = answer
            return
        if answer.codec not in self._codecs:
            self._codecs.append(answer.codec)
        self._codec[row] = self._codecs.index(answer.codec)
        self.num_frames[row], self.height[row], self.width[row] = answer.num_frames, answer.height, answer.width
        self.fps[row], self.duration[row] = answer.fps, answer.duration

    @property
    def kept(self) -> np.ndarray:
        """Which rows can be used: bool [N]."""
        return self.num_frames > 0

    def columns(self) -> dict[str, pa.Array]:
        """The made columns of the rows that can be used."""
        kept = self.kept
        height, width = self.height[kept], self.width[kept]
        codecs = pa.DictionaryArray.from_arrays(self._codec[kept], pa.array(self._codecs, pa.string()))
        return {
            "num_frames": pa.array(self.num_frames[kept]),
            "height": pa.array(height),
            "width": pa.array(width),
            "aspect_ratio": pa.array(height / width),
            "resolution": pa.array(height * width),
            "fps": pa.array(self.fps[kept], from_pandas=True),  # NaN becomes empty
            "duration": pa.array(self.duration[kept], from_pandas=True),
            "codec": codecs.cast(pa.string()),
        }


def complete(columns: pa.Table, rows: slice, answers: Answers, clip_ids: np.ndarray, typed: bool) -> pa.Table:
    """The rows that can be used: path, text, what was probed, clip_id, then the other columns in their order.

    `columns`: the whole table; `rows`: the stretch of it that `answers` are of; `clip_ids`: uint64, one a row of that
    stretch, for a table without them. With `typed`, columns of text that hold numbers in the whole table become
    numbers, so that all its parts get the same kinds.
    """
    if typed:
        for place, name in enumerate(columns.column_names):
            if name not in ("path", "text", "clip_id"):
                columns = columns.set_column(place, name, numbers_if_all(columns[name]))
    given = columns.slice(rows.start, rows.stop - rows.start).filter(pa.array(answers.kept))
    texts = given["text"].cast(pa.string()) if "text" in given.column_names else pa.nulls(len(given), pa.string())
    out: dict[str, pa.Array | pa.ChunkedArray] = {"path": given["path"].cast(pa.string())}
    out["text"] = pc.fill_null(texts, "")
    out |= answers.columns()
    known = "clip_id" in given.column_names
    out["clip_id"] = given["clip_id"].cast(pa.uint64()) if known else pa.array(clip_ids[answers.kept])
    out |= {name: given[name] for name in given.column_names if name not in out}
    return pa.table(out)


def numbers_if_all(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A text column as whole or decimal numbers where every filled cell is one and none has leading zeros."""
    if not pa.types.is_string(column.type):
        return column
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if filled.null_count == len(filled) or pc.any(pc.match_substring_regex(filled, r"^[+-]?0\d")).as_py():
        return column
    for kind in (pa.int64(), pa.float64()):
        try:
            return pc.cast(filled, kind)
        except pa.ArrowInvalid:
            continue
    return column


def write_bad(path: Path, bad: Sequence[tuple[int, str, str]]) -> Path | None:
    """Writes the list of bad rows, or removes the one of an earlier probe."""
    if not bad:
        path.unlink(missing_ok=True)
        return None
    rows, paths, reasons = zip(*bad, strict=True)
    write_table(pa.table({"row": pa.array(rows), "path": pa.array(paths), "reason": pa.array(reasons)}), path)
    return path
