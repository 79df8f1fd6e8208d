"""The clip table: one row a clip, numbers as NumPy arrays, strings in Arrow and read row by row; and what is said of
clips without a caption."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.clips.locations import is_url, join_location
from longtake.data.tables.cells import UNEVEN
from longtake.data.tables.checks import check_columns, clean_numbers, fingerprint_of, probe_command, refuse_repeated
from longtake.data.tables.convert import cached_shards, is_large
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.rows import FOLDER_TABLE, folder_notes, id_values, open_rows
from longtake.data.tables.shards import (
    OPTIONAL,
    TableShards,
    are_empty,
    invalid_rows,
    is_shards,
    without_numbers,
)

_PROBED = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "duration", "codec", "clip_id", UNEVEN)
_OTHERS = frozenset((*_PROBED, "path", "text", "score_vmafmotion", "type"))  # columns to look for no captions in
_SHOWN = 3  # clips and rows that are named
_LIKELY = ("caption", "text", "prompt", "description", "title")  # parts of the names of columns with captions


class _Held:
    """The texts of a table in memory, read as those of `TableShards` are."""

    def __init__(self, names: Sequence[str], texts: Mapping[str, pa.ChunkedArray]):
        self.names, self._texts = names, texts

    def text(self, name: str, row: int) -> str:
        return self._texts[name][row].as_py() or ""

    def find_empty(self, names: Sequence[str], most: int) -> tuple[int, list[int]]:
        empty = np.logical_and.reduce([are_empty(self._texts[name]) for name in names])
        return int(empty.sum()), np.flatnonzero(empty)[:most].tolist()


class ClipTable:
    """A table of clips that stays the same while a run reads it.

    Numeric columns, one entry a row:
    - `num_frames`, `height`, `width`: int64; `fps`: float64, NaN where unknown; `motion_score` and `uneven_times` (1
      where frames are not shown at equal steps): float64, NaN where unknown;
    - `clip_ids`: uint64, column `clip_id` or, without one, the hash of the path as written and its ordinal among equal
      paths (`compute_clip_ids`).

    A row whose numbers make no sense stays in the table with `num_frames` 0, so that no bucket takes it, and is listed
    in `invalid` with the reason. Pickling carries the file's name only; the other process opens it again.
    """

    weights = 1.0  # of every clip; tables in a mix have their own

    def __init__(
        self,
        source: Path,
        root: Path | str,
        captions: Sequence[str],
        numbers: Mapping[str, np.ndarray],
        invalid: dict[int, str],
        texts: _Held | TableShards,
    ):
        """Use `open`. `source` is named in errors; `numbers`: the arrays above."""
        self.source, self.root, self.captions = source, root, tuple(dict.fromkeys(("text", *captions)))
        self.invalid, self.names, self._texts = invalid, tuple(texts.names), texts
        self._fingerprint = texts.index["fingerprint"] if isinstance(texts, TableShards) else None
        self.num_frames, self.height, self.width = (numbers[name] for name in ("num_frames", "height", "width"))
        self.fps, self.clip_ids = numbers["fps"], numbers["clip_ids"]
        unknown = np.broadcast_to(np.nan, len(self.fps))
        self.motion_score, self.uneven_times = (numbers.get(name, unknown) for name in OPTIONAL)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        captions: Sequence[str] = ("text",),
        memory_efficient: bool | None = False,
    ) -> ClipTable:
        """Read `.csv`, `.parquet`, `.json`, `.jsonl`, `.arrow` / `.feather`, or a folder of shards.

        `root`: the folder that relative clip paths start from; None: the folder the table lies in.
        `captions`: further columns that hold captions. `memory_efficient`: convert the table to shards in a cache and
        read those; None: where its file is large (`convert.is_large`). It is the same table either way. A row with a
        cell that cannot be read is `invalid`. Raises `UserError` for a missing, damaged or empty table, a missing
        column, and clip ids that are no whole numbers or repeated.
        """
        source = Path(path)
        if is_shards(source):
            return cls.from_shards(source if source.is_dir() else source.parent, root=root, captions=captions)
        if source.is_dir():
            raise UserError(f"{source}: is a folder, not a table; `{probe_command(source)}` makes a table")
        if memory_efficient or (memory_efficient is None and is_large(source)):
            return cls.from_shards(cached_shards(source, root), source, base_folder(source, root), captions)
        rows = open_rows(source, texts=captions)
        check_columns(rows.names, source, captions, root)
        columns, unreadable = rows.whole()
        names = dict.fromkeys(("path", "text", *captions))
        texts = {name: without_numbers(columns[name], name, source) for name in names}
        numbers, invalid = clean_numbers(columns, unreadable)
        invalid = rows.with_lines(invalid)
        if "clip_id" in rows.names:
            numbers["clip_ids"] = id_values(columns["clip_id"], source, 0, unreadable)
        else:
            numbers["clip_ids"] = compute_clip_ids(pc.fill_null(columns["path"], "").to_pylist())
        refuse_repeated(numbers["clip_ids"], source)
        return cls(source, base_folder(source, root), captions, numbers, invalid, _Held(rows.names, texts))

    @classmethod
    def from_shards(
        cls,
        folder: Path,
        source: Path | None = None,
        root: str | os.PathLike[str] | None = None,
        captions: Sequence[str] = ("text",),
        fingerprint: str | None = None,
    ) -> ClipTable:
        """Return a table over shards on disk. `source`: the table they were made from, if a user knows it by that.
        Raises `UserError` also where `fingerprint` is given and the shards have another one."""
        shards = TableShards(folder)
        if fingerprint not in (None, shards.index["fingerprint"]):
            raise UserError(f"{folder}: has been replaced by other shards since the run began; start the run again")
        check_columns(shards.names, source or folder, captions)
        wrong = shards.open_texts(("path", "text", *captions))
        start = shards.root if root is None else base_folder(folder, root)
        table = cls(source or folder, start, captions, shards.numbers, invalid_rows(folder), shards)
        return table._without_rows(wrong) if wrong else table

    def _without_rows(self, wrong: Mapping[int, str]) -> ClipTable:
        """Return the same table, in which further rows cannot be used."""
        self.invalid = dict(sorted((dict(wrong) | self.invalid).items()))
        rows = np.fromiter(wrong, np.int64, len(wrong))
        self.num_frames, self.height, self.width = map(np.array, (self.num_frames, self.height, self.width))
        for numbers in (self.num_frames, self.height, self.width):
            numbers[rows] = 0
        self._fingerprint = fingerprint_of(partial(getattr, self))
        return self

    def __len__(self) -> int:
        return len(self.num_frames)

    def __reduce__(self) -> tuple:
        root = self.root if isinstance(self.root, str) else self.root.absolute()
        if isinstance(self._texts, TableShards):
            folder, fingerprint = self._texts.folder.absolute(), self._texts.index["fingerprint"]
            return ClipTable.from_shards, (folder, self.source.absolute(), root, self.captions, fingerprint)
        return ClipTable.open, (self.source.absolute(), root, self.captions)

    def location(self, row: int) -> str:
        """Return the file of a row, as a path or a URL; a relative path starts from `root`."""
        return self.location_of(row, self.written_path(row))

    def location_of(self, row: int, path: str) -> str:
        """Another file that a row names, as `location` gives its own."""
        return join_location(self.root, path)

    def written_path(self, row: int) -> str:
        """Return the path of a row as the table has it."""
        return self._texts.text("path", row)

    def caption(self, row: int, column: str = "text") -> str:
        """Return the text of a row in one of the caption columns, without suffix; empty where the table has none."""
        return self._texts.text(column, row)

    def count_empty(self, columns: Sequence[str]) -> int:
        """How many rows have no text in any of some caption columns; of shards, the texts themselves are not read."""
        return self.find_empty(columns, 0)[0]

    def find_empty(self, columns: Sequence[str], most: int) -> tuple[int, list[int]]:
        """Return the count of `count_empty`, and the first `most` of these rows."""
        if not columns:
            return len(self), [*range(min(most, len(self)))]
        return self._texts.find_empty(columns, most)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over clip ids and sizes: the same for a CSV and a Parquet file of the same clips."""
        return self._fingerprint or fingerprint_of(partial(getattr, self))


def base_folder(source: Path, root: str | os.PathLike[str] | None) -> Path | str:
    """Where relative paths start: `root`, else the table's folder; a URL is a string. `UserError` for no folder."""
    if root is None:
        return source.parent
    if is_url(os.fspath(root)):
        return os.fspath(root)
    if not Path(root).is_dir():
        raise UserError(f"dataset.root = {os.fspath(root)!r}: no such folder; name the one relative paths start from")
    return Path(root)


def caption_lines(tables: Sequence[ClipTable], captions: Mapping[str, float] | None) -> str:
    """For the report before the first step: the caption columns, and how many clips have no caption in any.

    `tables`: all that a run trains on; `captions`: `dataset.captions`. Where clips have none, the line is a warning,
    names the first of them, and says what to do if others of the tables' columns might hold them. Further lines count
    the rows that cannot be used, with the first reasons, and files of folders that are not used.
    """
    columns, total = tuple(captions or ("text",)), sum(map(len, tables))
    count, first = 0, []
    for table in tables:
        empty, rows = table.find_empty([name for name in columns if name in table.captions], _SHOWN)
        count += empty
        first += [table.written_path(row) or f"row {row}" for row in rows]
    folders = [each for each in tables if each.source.name == FOLDER_TABLE]
    tabled = [each for each in tables if each not in folders]
    names = list(dict.fromkeys(name for each in tabled for name in each.names if name not in columns))
    line = f"captions: column {', '.join(columns)}, empty for {count:,} of {total:,} clips"
    if count:
        where = "; of a folder, the caption of a.mp4 is the text in a.txt beside it" if folders else ""
        line = f"warning: {line} ({_first(first, count)}){where}{remedy(names)}"
    lines = [line]
    invalid = [f"row {row} of {each.source}: {each.invalid[row]}" for each in tables for row in sorted(each.invalid)]
    if invalid:
        shown = "; ".join(invalid[:_SHOWN])
        rest = "; `longtake data stats` names more" if len(invalid) > _SHOWN else ""
        lines.append(f"warning: rows: {len(invalid):,} of {total:,} cannot be used; the first: {shown}{rest}")
    lines += [f"warning: {each.root}: {note}" for each in tables for note in folder_notes(each.source)]
    return "\n".join(lines)


def _first(names: Sequence[str], count: int) -> str:
    """Return the first of `count` names."""
    return ", ".join(names[:_SHOWN]) + (f" and {count - _SHOWN:,} more" if count > _SHOWN else "")


def probe_warning(columns: pa.Table, source: object) -> str | None:
    """What to say before a table is probed whose clips have no captions, or some of them; None where all have."""
    names = columns.column_names
    if "text" not in names:
        found = ", ".join(names)
        return f"{source}: there is no column text (found {found}), so no clip has a caption{remedy(names, add=True)}"
    empty = np.flatnonzero(are_empty(columns["text"]))
    if not len(empty):
        return None
    first = _first([columns["path"][row].as_py() or f"row {row}" for row in empty[:_SHOWN].tolist()], len(empty))
    return f"{source}: text is empty for {len(empty):,} of {len(columns):,} clips ({first}){remedy(names)}"


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
