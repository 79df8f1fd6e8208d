"""What must hold of a clip table, however it is stored, and of its numbers; format versions, and the fingerprint."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.tables.cells import SCORE, UNEVEN
from longtake.data.tables.ids import first_repeated

TABLE_VERSION = 1  # of clip tables in Parquet and Arrow files
SHARDS_VERSION = 1  # of folders of shards
FORMAT = {"longtake_format": "clip table", "longtake_format_version": str(TABLE_VERSION)}  # in Parquet and Arrow files
REQUIRED = ("path", "text", "num_frames", "height", "width", "fps")
_LARGEST = 2**31  # more frames or pixels a side than any clip has: a larger number is a slip
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


def probe_command(source: Path, root: str | os.PathLike[str] | None = None) -> str:
    """Return the command line that makes a table of a list or folder of clips whose paths start from `root`, in a
    new file of the working directory."""
    stem = source.stem or "clips"
    names = (f"{stem}{part}.parquet" for part in ("", ".probed", *(f".probed{number}" for number in range(2, 100))))
    target = next((name for name in names if not Path(name).exists()), f"{stem}.probed.parquet")
    words = ["longtake", "data", "probe", str(source), "-o", target]
    return shlex.join(words if root is None else [*words, "--root", os.fspath(root)])


def check_columns(
    names: Sequence[str], source: Path, captions: Sequence[str] = (), root: str | os.PathLike[str] | None = None
) -> None:
    """Raise `UserError` where a table lacks a column that training reads. `root`: where its paths start, if given."""
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        then = "" if root is None else "; it needs no dataset.root"
        raise UserError(
            f"{source}: column {', '.join(missing)} is missing (found {named(names)}); `{probe_command(source, root)}` "
            f"makes a table with num_frames, height, width and fps of one with path and text{then}"
        )
    for name in captions:
        if name not in names:
            raise UserError(f"dataset.captions: {source} has no column {name}; choose among its columns {named(names)}")


def check_path(names: Sequence[str], source: Path) -> None:
    """Raise `UserError` where a table lacks the column path."""
    if "path" not in names:
        raise UserError(f"{source}: column path is missing (found {named(names)}); it names the file of each clip")


def no_rows(source: Path) -> UserError:
    """For a table without rows."""
    return UserError(f"{source}: the table has no rows; list one clip a row with its path and text")


def check_table_format(metadata: Mapping[bytes, bytes] | None, source: Path) -> None:
    """Refuses a table of a newer format version; one without any was written by another program and is fine."""
    found = (metadata or {}).get(b"longtake_format_version")
    if found is not None:
        check_version(found.decode("utf-8", "replace"), TABLE_VERSION, source)


def check_version(found: object, known: int, source: Path) -> None:
    """Raise `UserError` where `found` is no version up to `known`."""
    text = str(found)
    if not text.isdecimal() or not 1 <= int(text) <= known:
        raise UserError(
            f"{source}: has format version {text}, and this Longtake reads up to version {known}; "
            "install a newer Longtake, or make the file again with this one"
        )


def refuse_repeated(ids: np.ndarray, source: Path) -> None:
    """Raise `UserError` where two rows have the same clip id."""
    if found := first_repeated(ids):
        raise UserError(
            f"{source}: rows {found[0]} and {found[1]} have the same clip_id {found[2]}; "
            "ids must differ: leave the column out to have them made from the paths"
        )


def named(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "no column"


@contextmanager
def readable(source: Path) -> Iterator[None]:
    """Turn what pyarrow says of a damaged file into a `UserError` of one line."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:  # the last two: of names in it
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = source.suffix[1:] or "shards"
        raise UserError(f"{source}: cannot be read as {kind} ({first_line}); write the table again") from error


def clean_numbers(
    columns: pa.Table | pa.RecordBatch, unreadable: Mapping[int, str], first_row: int = 0
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """Return the numbers of some rows, and why a row cannot be used: `unreadable`, or numbers that make no sense.

    Rows of both are counted from `first_row`. `num_frames`, `height`, `width`: int64 [N], 0 in such a row; `fps`:
    float64 [N], NaN where unknown; `motion_score`, `uneven_times`: the same, only where the table has
    the column.
    """
    found = {name: floats(columns, name) for name in ("num_frames", "height", "width", "fps")}
    invalid = {row - first_row: reason for row, reason in unreadable.items()}
    for name in ("num_frames", "height", "width"):
        bad = ~((found[name] >= 1) & (found[name] < _LARGEST)) | (np.floor(found[name]) != found[name])
        _note(invalid, bad, name, found[name], "a whole number from 1")
    fps = found["fps"]
    _note(invalid, np.isinf(fps) | (fps < 0), "fps", fps, "0 or more, or empty where unknown")
    paths = pc.fill_null(columns["path"], "")
    for reason, bad in (("is empty", pc.equal(paths, "")), ("holds a NUL byte", pc.match_substring(paths, "\0"))):
        for row in np.flatnonzero(np.asarray(bad)).tolist():
            if first_row + row not in unreadable:
                invalid[row] = f"path {reason}"
    wrong = np.fromiter(invalid, dtype=np.int64, count=len(invalid))
    for name in ("num_frames", "height", "width"):
        found[name][wrong] = 0
        found[name] = found[name].astype(np.int64)
    if SCORE in columns.schema.names:
        found["motion_score"] = floats(columns, SCORE)
    if UNEVEN in columns.schema.names:
        found[UNEVEN] = floats(columns, UNEVEN)
    return found, {first_row + row: invalid[row] for row in sorted(invalid)}


def _note(invalid: dict[int, str], bad: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    for row in np.flatnonzero(bad).tolist():
        found = "empty" if np.isnan(values[row]) else f"{values[row]:g}"
        invalid.setdefault(row, f"{name} is {found}, expected {rule}")


def floats(columns: pa.Table | pa.RecordBatch, name: str) -> np.ndarray:
    """Return a column of numbers as float64, NaN where empty."""
    return np.asarray(pc.fill_null(pc.cast(columns[name], pa.float64(), safe=False), np.nan)).astype(np.float64)
