"""The clip table: one row a clip, numbers as NumPy arrays, strings in Arrow and read row by row."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from longtake.contracts import UserError
from longtake.random import hash64

REQUIRED = ("path", "text", "num_frames", "height", "width", "fps")
SCORE = "score_vmafmotion"
_LARGEST = 2**31  # more frames or pixels a side than any clip has: a larger number is a slip


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

    def __init__(self, columns: pa.Table, source: Path, root: Path, captions: Sequence[str] = ("text",)):
        """Use `open`. `columns`: at least the `REQUIRED` ones; `source` is named in errors."""
        self.source, self.root = source, root
        self.invalid: dict[int, str] = {}
        self._paths = text_column(columns, "path", source)
        self._texts = {name: text_column(columns, name, source) for name in dict.fromkeys(("text", *captions))}
        rows = np.arange(len(columns))
        numbers = {name: _floats(columns, name, source) for name in ("num_frames", "height", "width", "fps")}
        for name in ("num_frames", "height", "width"):
            bad = ~((numbers[name] >= 1) & (numbers[name] < _LARGEST)) | (numbers[name] % 1 != 0)
            self._mark(rows[bad], name, numbers[name], "a whole number from 1")
        fps = numbers["fps"]
        self._mark(rows[np.isinf(fps) | (fps < 0)], "fps", fps, "0 or more, or empty where unknown")
        for row in rows[pc.equal(pc.fill_null(self._paths, ""), "").to_numpy()].tolist():
            self.invalid[row] = "path is empty"
        wrong = np.fromiter(self.invalid, dtype=np.int64, count=len(self.invalid))
        for name in ("num_frames", "height", "width"):
            numbers[name][wrong] = 0
        self.num_frames, self.height, self.width = (
            numbers[name].astype(np.int64) for name in ("num_frames", "height", "width")
        )
        self.fps = fps
        known = SCORE in columns.column_names
        self.motion_score = _floats(columns, SCORE, source) if known else np.full(len(rows), np.nan)
        self.clip_ids = _clip_ids(columns, source)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        captions: Sequence[str] = ("text",),
    ) -> ClipTable:
        """Reads `.csv`, `.parquet`, or `.arrow` / `.feather` (the last two memory-mapped).

        `root`: the folder that relative clip paths start from; None: the folder the table lies in.
        `captions`: further columns that hold captions. Raises `UserError`
        for a missing, unreadable or empty table, a missing column, text where numbers belong, and repeated clip ids.
        """
        source = Path(path)
        columns = read_columns(source)
        missing = [name for name in REQUIRED if name not in columns.column_names]
        if missing:
            raise UserError(
                f"{source}: column {_names(missing)} is missing (found {_names(columns.column_names)}); "
                f"`longtake data probe {source} -o {source.with_suffix('.parquet').name}` fills in "
                "num_frames, height, width and fps for a table with path and text"
            )
        for name in captions:
            if name not in columns.column_names:
                found = _names(columns.column_names)
                raise UserError(f"dataset.captions: {source} has no column {name}; choose among its columns {found}")
        if not len(columns):
            raise UserError(f"{source}: the table has no rows; list one clip a row with its path and text")
        return cls(columns, source, base_folder(source, root), captions)

    weights = 1.0  # of every clip; tables in a mix have their own

    def __len__(self) -> int:
        return len(self.num_frames)

    def __reduce__(self) -> tuple:
        return ClipTable.open, (self.source.absolute(), self.root.absolute(), tuple(self._texts))

    def path(self, row: int) -> Path:
        """The file of a row; a relative path starts from `root`."""
        return self.root / (self._paths[row].as_py() or "")

    def written_path(self, row: int) -> str:
        """The path of a row as the table has it."""
        return self._paths[row].as_py() or ""

    def caption(self, row: int, column: str = "text") -> str:
        """The text of a row in one of the caption columns, without suffix; empty where the table has none."""
        return self._texts[column][row].as_py() or ""

    @property
    def fingerprint(self) -> str:
        """16 hex digits over clip ids and sizes: the same for a CSV and a Parquet file of the same clips."""
        digest = hashlib.blake2b(digest_size=8)
        for values in (self.clip_ids, self.num_frames, self.height, self.width, np.nan_to_num(self.fps)):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def _mark(self, rows: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
        for row in rows.tolist():
            found = "empty" if np.isnan(values[row]) else f"{values[row]:g}"
            self.invalid.setdefault(row, f"{name} is {found}, expected {rule}")


def base_folder(source: Path, root: str | os.PathLike[str] | None) -> Path:
    """Where relative paths of a table start: `root`, else the table's folder. Raises `UserError` if `root` is none."""
    if root is None:
        return source.parent
    if not Path(root).is_dir():
        raise UserError(f"dataset.root = {os.fspath(root)!r}: no such folder; name the one relative paths start from")
    return Path(root)


def read_columns(source: Path, as_text: bool = False) -> pa.Table:
    """The whole table. In a CSV, path and text are text whatever they look like; with `as_text` all columns are.

    Raises `UserError` where the file is missing, of an unknown kind, or damaged, and where columns share a name.
    """
    columns = _read_columns(source, as_text)
    repeated = sorted({name for name in columns.column_names if columns.column_names.count(name) > 1})
    if repeated:
        raise UserError(f"{source}: there are several columns {_names(repeated)}; names of columns must differ")
    return columns


def _read_columns(source: Path, as_text: bool) -> pa.Table:
    suffix = source.suffix.lower()
    if not source.is_file():
        raise UserError(f"{source}: no such file; give the clip table as .csv, .parquet or .arrow")
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
    raise UserError(f"{source}: tables end in .csv, .parquet, .arrow or .feather, not {suffix or 'nothing'!r}")


def _read_csv(source: Path, as_text: bool) -> pa.Table:
    if source.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty; its first line should name the columns, at least path and text")
    with pyarrow.csv.open_csv(source, parse_options=_CSV) as reader:
        names = reader.schema.names
    texts = names if as_text else [name for name in names if name in ("path", "text")]
    options = pyarrow.csv.ConvertOptions(
        column_types={name: pa.string() for name in texts} | ({} if as_text else {"clip_id": pa.uint64()}),
        strings_can_be_null=False,
    )
    return pyarrow.csv.read_csv(source, parse_options=_CSV, convert_options=options)


_CSV = pyarrow.csv.ParseOptions(newlines_in_values=True)


def compute_clip_ids(paths: Sequence[str]) -> np.ndarray:
    """Ids of clips from their paths as written: uint64 [N]; the n-th row with the same path gets another id."""
    seen: dict[str, int] = {}
    ids = np.empty(len(paths), np.uint64)
    for row, path in enumerate(paths):
        ordinal = seen.get(path, 0)
        seen[path] = ordinal + 1
        ids[row] = hash64(path, ordinal)
    return ids


def _clip_ids(columns: pa.Table, source: Path) -> np.ndarray:
    if "clip_id" not in columns.column_names:
        ids = compute_clip_ids(text_column(columns, "path", source).to_pylist())
    else:
        ids = id_column(columns, source)
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        repeated = unique[counts > 1][0]
        rows = np.flatnonzero(ids == repeated)
        raise UserError(
            f"{source}: rows {rows[0]} and {rows[1]} have the same clip_id {repeated}; "
            "ids must differ: leave the column out to have them made from the paths"
        )
    return ids


def id_column(columns: pa.Table, source: Path) -> np.ndarray:
    """Column clip_id, of integers or their digits, as uint64 [N]. Raises `UserError` naming the first wrong cell."""
    column = columns["clip_id"]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    elif not pa.types.is_integer(column.type):
        raise UserError(f"{source}: column clip_id holds {column.type}; it must hold whole numbers")
    try:
        ids = pc.cast(column, pa.uint64())
        if not ids.null_count:
            return ids.to_numpy()
    except pa.ArrowInvalid:
        pass
    wrong = ((row, value) for row, value in enumerate(column.to_pylist()) if not _is_id(value))
    row, value = next(wrong, (0, column[0].as_py()))
    found = "empty" if value in (None, "") else repr(value)
    raise UserError(
        f"{source}: clip_id of row {row} is {found}; it must be a whole number from 0 below 2**64 in every row: "
        "leave the column out to have ids made from the paths"
    )


def _is_id(value: object) -> bool:
    text = str(value)
    return text.isdecimal() and int(text) < 2**64


def text_column(columns: pa.Table, name: str, source: Path) -> pa.ChunkedArray:
    """A column of texts as Arrow strings. Raises `UserError` where it holds something else."""
    column = columns[name]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column
    if pa.types.is_null(column.type) or pa.types.is_dictionary(column.type):
        return column.cast(pa.string())
    raise UserError(f"{source}: column {name} holds {column.type}; it must hold text")


def _floats(columns: pa.Table, name: str, source: Path) -> np.ndarray:
    """A numeric column as float64, NaN where empty. Raises `UserError` naming the first cell that is no number."""
    column = columns[name]
    try:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            trimmed = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, trimmed.type), trimmed)
        return pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan")).to_numpy().copy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row, value = _first_text(column)
        raise UserError(f"{source}: {name} of row {row} is {value!r}; the column must hold numbers") from error


def _first_text(column: pa.ChunkedArray) -> tuple[int, object]:
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value if value is not None else 0)
        except (TypeError, ValueError):
            return row, value
    return 0, column[0].as_py()


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "no column"
