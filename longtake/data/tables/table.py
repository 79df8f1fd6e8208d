"""The clip table: one row a clip, numbers as NumPy arrays, strings in Arrow and read row by row."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.data.clips.remote import is_url, join_location, refuse_url
from longtake.data.formats import check_table_format
from longtake.data.tables import json_table
from longtake.data.tables.cache import cached_shards, is_large
from longtake.data.tables.captions import are_empty
from longtake.data.tables.checks import check_columns, fingerprint_of, refuse_repeated
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.numbers import clean_numbers
from longtake.data.tables.rows import csv_names, id_values, refuse_repeated_names
from longtake.data.tables.shards import Shards, is_shards


class ClipTable:
    """A table of clips that stays the same while a run reads it.

    Numeric columns, one entry a row:
    - `num_frames`, `height`, `width`: int64; `fps`: float64, NaN where unknown; `motion_score`: float64, NaN where
      unknown;
    - `clip_ids`: uint64, column `clip_id` or, without one, the hash of the path as written and its ordinal among equal
      paths (`compute_clip_ids`).

    A row whose numbers make no sense stays in the table with `num_frames` 0, so that no bucket takes it, and is listed
    in `invalid` with the reason. Pickling carries the file's name only; the other process opens it again.
    """

    def __init__(
        self,
        source: Path,
        root: Path | str,
        captions: Sequence[str],
        numbers: Mapping[str, np.ndarray],
        invalid: dict[int, str],
        text: Callable[[str, int], str],
        names: Sequence[str],
        count_empty: Callable[[Sequence[str]], int],
        shards: Shards | None = None,
    ):
        """Use `open`. `numbers`: the arrays above; `text(column, row)` reads a cell; `source` is named in errors;
        `names`: all columns; `count_empty(columns)`: as the method."""
        self.source, self.root, self.captions = source, root, tuple(dict.fromkeys(("text", *captions)))
        self.invalid, self._text, self._shards = invalid, text, shards
        self.names, self._count_empty = tuple(names), count_empty
        self.num_frames, self.height, self.width = (numbers[name] for name in ("num_frames", "height", "width"))
        self.fps, self.clip_ids = numbers["fps"], numbers["clip_ids"]
        self.motion_score = numbers.get("motion_score", np.broadcast_to(np.nan, len(self.fps)))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        captions: Sequence[str] = ("text",),
        memory_efficient: bool | None = False,
    ) -> ClipTable:
        """Reads `.csv`, `.parquet`, `.json`, `.jsonl`, `.arrow` / `.feather` (the last two memory-mapped), or a folder
        of shards.

        `root`: the folder that relative clip paths start from; None: the folder the table lies in.
        `captions`: further columns that hold captions. `memory_efficient`: convert the table to shards in a cache and
        read those; None: where its file is large (`cache.is_large`). Raises `UserError`
        for a missing, unreadable or empty table, a missing column, text where numbers belong, and repeated clip ids.
        """
        source = Path(path)
        if is_shards(source):
            return cls.from_shards(source if source.is_dir() else source.parent, root=root, captions=captions)
        if source.is_dir():
            raise UserError(f"{source}: is a folder, not a table; `longtake data probe {source} -o ...` makes a table")
        if memory_efficient or (memory_efficient is None and is_large(source)):
            return cls.from_shards(cached_shards(source), source, base_folder(source, root), captions)
        columns = read_columns(source)
        check_columns(columns.column_names, source, captions)
        if not len(columns):
            raise UserError(f"{source}: the table has no rows; list one clip a row with its path and text")
        texts = {name: text_column(columns, name, source) for name in dict.fromkeys(("path", "text", *captions))}
        columns = columns.set_column(columns.column_names.index("path"), "path", texts["path"])
        numbers, invalid = clean_numbers(columns, source)
        numbers["clip_ids"] = _clip_ids(columns, source)

        def text(column: str, row: int) -> str:
            return texts[column][row].as_py() or ""

        def count_empty(names: Sequence[str]) -> int:
            return int(np.logical_and.reduce([are_empty(texts[name]) for name in names]).sum())

        names = columns.column_names
        return cls(source, base_folder(source, root), captions, numbers, invalid, text, names, count_empty)

    @classmethod
    def from_shards(
        cls,
        folder: Path,
        source: Path | None = None,
        root: str | os.PathLike[str] | None = None,
        captions: Sequence[str] = ("text",),
        fingerprint: str | None = None,
    ) -> ClipTable:
        """A table over shards on disk. `source`: the table they were made from, if a user knows it by that.

        Raises `UserError` also where `fingerprint` is given and the shards have another one.
        """
        shards = Shards(folder)
        if fingerprint not in (None, shards.index["fingerprint"]):
            raise UserError(f"{folder}: has been replaced by other shards since the run began; start the run again")
        check_columns(shards.names, source or folder, captions)
        shards.open_texts(("path", "text", *captions))
        start = shards.root if root is None else base_folder(folder, root)
        texts = (shards.text, shards.names, shards.count_empty)
        return cls(source or folder, start, captions, shards.numbers, shards.invalid(), *texts, shards)

    weights = 1.0  # of every clip; tables in a mix have their own

    def __len__(self) -> int:
        return len(self.num_frames)

    def __reduce__(self) -> tuple:
        root = self.root if isinstance(self.root, str) else self.root.absolute()
        if self._shards is not None:
            folder, fingerprint = self._shards.folder.absolute(), self.fingerprint
            return ClipTable.from_shards, (folder, self.source.absolute(), root, self.captions, fingerprint)
        return ClipTable.open, (self.source.absolute(), root, self.captions)

    def location(self, row: int) -> str:
        """The file of a row, as a path or a URL; a relative path starts from `root`."""
        return join_location(self.root, self.written_path(row))

    def path(self, row: int) -> Path:
        """The file of a row of this machine's; what lies on a server has a `location` only."""
        return Path(self.location(row))

    def written_path(self, row: int) -> str:
        """The path of a row as the table has it."""
        return self._text("path", row)

    def caption(self, row: int, column: str = "text") -> str:
        """The text of a row in one of the caption columns, without suffix; empty where the table has none."""
        return self._text(column, row)

    def count_empty(self, columns: Sequence[str]) -> int:
        """How many rows have no text in any of some caption columns; of shards, the texts themselves are not read."""
        return self._count_empty(columns) if columns else len(self)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over clip ids and sizes: the same for a CSV and a Parquet file of the same clips."""
        if self._shards is not None:
            return self._shards.index["fingerprint"]
        return fingerprint_of(partial(getattr, self))


def base_folder(source: Path, root: str | os.PathLike[str] | None) -> Path | str:
    """Where relative paths of a table start: `root`, else the table's folder; a URL is a string.

    Raises `UserError` if `root` is no folder.
    """
    if root is None:
        return source.parent
    if is_url(os.fspath(root)):
        return os.fspath(root)
    if not Path(root).is_dir():
        raise UserError(f"dataset.root = {os.fspath(root)!r}: no such folder; name the one relative paths start from")
    return Path(root)


def read_columns(source: Path, as_text: bool = False) -> pa.Table:
    """The whole table. In a CSV, path and text are text whatever they look like; with `as_text` all columns are.

    Raises `UserError` where the file is missing, of an unknown kind, or damaged, and where columns share a name.
    """
    columns = _read_columns(source, as_text)
    check_table_format(columns.schema.metadata, source)
    refuse_repeated_names(columns.column_names, source)
    return columns


def _read_columns(source: Path, as_text: bool) -> pa.Table:
    suffix = source.suffix.lower()
    if not source.is_file():
        refuse_url(source)
        raise UserError(f"{source}: no such file; give the clip table as .csv, .parquet, .arrow, .json or .jsonl")
    if suffix in json_table.SUFFIXES:
        return json_table.read_json(source)
    try:
        if suffix == ".csv":
            return _read_csv(source, as_text)
        if suffix == ".parquet":
            return pyarrow.parquet.read_table(source, memory_map=True)
        if suffix in (".arrow", ".feather"):
            return pa.ipc.open_file(pa.memory_map(str(source))).read_all()
    except (pa.ArrowException, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{source}: cannot be read as {suffix[1:]} ({first_line}); write the table again") from error
    raise UserError(
        f"{source}: tables end in .csv, .parquet, .arrow, .feather, .json or .jsonl, not {suffix or 'nothing'!r}"
    )


def _read_csv(source: Path, as_text: bool) -> pa.Table:
    if source.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty; its first line should name the columns, at least path and text")
    with pyarrow.csv.open_csv(source, parse_options=_CSV) as reader:
        written = reader.schema.names
    names = csv_names(written, source)
    kinds = {"path": pa.string(), "text": pa.string(), "clip_id": pa.uint64()}
    if as_text:
        kinds = dict.fromkeys(names, pa.string())
    options = pyarrow.csv.ConvertOptions(
        column_types={place: kinds[name] for place, name in zip(written, names, strict=True) if name in kinds},
        strings_can_be_null=False,
    )
    return pyarrow.csv.read_csv(source, parse_options=_CSV, convert_options=options).rename_columns(names)


_CSV = pyarrow.csv.ParseOptions(newlines_in_values=True)


def _clip_ids(columns: pa.Table, source: Path) -> np.ndarray:
    if "clip_id" in columns.column_names:
        ids = id_values(columns["clip_id"], source)
    else:
        ids = compute_clip_ids(pc.fill_null(columns["path"], "").to_pylist())
    refuse_repeated(ids, source)
    return ids


def text_column(columns: pa.Table, name: str, source: Path) -> pa.ChunkedArray:
    """A column of texts as Arrow strings. Raises `UserError` where it holds something else."""
    column = columns[name]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column
    if pa.types.is_null(column.type) or pa.types.is_dictionary(column.type):
        return column.cast(pa.string())
    raise UserError(f"{source}: column {name} holds {column.type}; it must hold text")
