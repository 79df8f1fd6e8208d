"""Ids of clips: made from paths, many at a time, and the search for repeated ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from longtake.durable import unfinished
from longtake.random import hash64, sample_ids

_TWIN = 1 << 32  # copies of one clip are counted far below this, so a twin's id is never that of a copy
REPEATS = ".repeats.npz"  # the end of the name of a file in which they are kept: `.TABLE.FINGERPRINT.repeats.npz`
_ROWS_AT_ONCE = 1 << 22  # sorted together: bounds the memory of a search


def compute_clip_ids(paths: Sequence[str]) -> np.ndarray:
    """Ids of clips from their paths as written: uint64 [N], `hash64(path, n)` for the n-th row (from 0) of a path."""
    ids = path_hashes(path.encode("utf-8", "surrogateescape") for path in paths)
    rows, ordinals = repeats(ids)
    ids[rows] = [hash64(paths[row], n) for row, n in zip(rows.tolist(), ordinals.tolist(), strict=True)]
    return ids


def path_hashes(paths: Iterable[bytes]) -> np.ndarray:
    """`hash64(path, 0)` of UTF-8 paths: uint64 [N], with one call of the hash a path."""
    blake, length_of = hashlib.blake2b, cache(lambda path_bytes: path_bytes.to_bytes(8, "little"))
    end = (1).to_bytes(8, "little") + b"0"
    digests = b"".join([blake(length_of(len(path)) + path + end, digest_size=8).digest() for path in paths])
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def repeats(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows whose id occurs in an earlier row, and in how many: two int64 arrays, rows ascending.

    `ids`: uint64 [N], a memory map too; what is held besides it is bounded by a few million rows and the answer.
    """
    parts = 1 << (len(ids) // _ROWS_AT_ONCE).bit_length()
    found_rows, found_ordinals = [], []
    for part in range(parts):
        rows = _rows_of_part(ids, part, parts)
        values = ids[rows]
        ordered = np.sort(values)  # takes half of what the order does, which is wanted only where ids repeat
        if not (ordered[1:] == ordered[:-1]).any():
            continue
        order = np.argsort(values, kind="stable")  # equal ids stay in the order of their rows
        first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        ordinal = np.arange(len(ordered)) - np.repeat(first, np.diff(np.append(first, len(ordered))))
        found_rows.append(rows[order[ordinal > 0]])
        found_ordinals.append(ordinal[ordinal > 0])
    if not found_rows:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows, ordinals = np.concatenate(found_rows), np.concatenate(found_ordinals)
    order = np.argsort(rows)
    return rows[order], ordinals[order]


def rename_repeats(ids: np.ndarray, kept: Path | None = None) -> None:
    """Make all ids, uint64 [N], differ, in place: one that has occurred in n earlier rows is mixed with n.

    `kept`: a file in which the repeats of these ids, and of no others, are kept from the first time on.
    """
    rows, ordinals = repeats(ids) if kept is None else _kept_repeats(kept, ids)
    ids[rows] = sample_ids(ids[rows], _TWIN + ordinals)


def _kept_repeats(path: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(path, allow_pickle=False) as file:
        rows, ordinals = file["rows"].astype(np.int64), file["ordinals"].astype(np.int64)
        if len(rows) == len(ordinals) and (not len(rows) or 0 <= rows.min() <= rows.max() < len(ids)):
            return rows, ordinals
    rows, ordinals = repeats(ids)
    with suppress(OSError):  # a folder may be read-only: they are searched again then
        with unfinished(path, synced=False) as partial:
            np.savez(partial, rows=rows, ordinals=ordinals)
        for other in path.parent.glob(f"{escape(path.name.removesuffix(REPEATS).rpartition('.')[0])}.*{REPEATS}"):
            if other != path:
                other.unlink(missing_ok=True)
    return rows, ordinals


def first_repeated(ids: np.ndarray) -> tuple[int, int, int] | None:
    """Return the first row whose id an earlier row has: (earlier row, row, id); None where all differ."""
    rows, _ = repeats(ids)
    if not len(rows):
        return None
    repeated = ids[rows[0]]
    return int(np.flatnonzero(ids == repeated)[0]), int(rows[0]), int(repeated)


def _rows_of_part(ids: np.ndarray, part: int, parts: int) -> np.ndarray:
    """Return the rows of one of `parts` (a power of two) shares of about equal size; equal ids are in the same one."""
    if parts == 1:
        return np.arange(len(ids))
    shift, found = np.uint64(65 - parts.bit_length()), []
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        mixed = ids[start : start + _ROWS_AT_ONCE] * np.uint64(0x9E3779B97F4A7C15)  # ids given by hand may be small
        found.append(start + np.flatnonzero((mixed >> shift) == np.uint64(part)))
    return np.concatenate(found)
