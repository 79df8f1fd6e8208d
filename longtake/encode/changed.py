"""Clip files that have changed since they were encoded: by size and time, then by content."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.encode.shards import UNKNOWN_DIGEST, file_digest, file_facts, files_of

ALL_COMPARED = 100_000  # files; of more than these, `SOME_COMPARED`, evenly spread
SOME_COMPARED = 10_000
MOST_READ = 1_000  # files with another time alone whose contents are read before training, evenly spread
_READERS = 16  # threads that look at files: on a network disk each look is a wait


@dataclass(frozen=True)
class FilesThen:
    """Rows of a table, and their files when they were encoded: int64 [N], digests uint64 [N]."""

    rows: np.ndarray
    sizes: np.ndarray  # -1: no local file
    times: np.ndarray  # nanoseconds
    digests: np.ndarray


@dataclass(frozen=True)
class FileChanges:
    """Changes of files since the encode, as rows of the table."""

    compared: int  # files that are there, of those that were looked at
    resized: tuple[int, ...] = ()
    rewritten: tuple[int, ...] = ()  # of equal size, other contents
    unknown: tuple[int, ...] = ()  # of equal size and another time, contents not compared
    gone: tuple[int, ...] = ()

    @property
    def changed(self) -> tuple[int, ...]:
        """Rows whose latents are of another file."""
        return tuple(sorted(self.resized + self.rewritten))


def compare_files(
    then: FilesThen, table: ClipTable | MixedTable, columns: Sequence[str], *, every_content: bool = False
) -> FileChanges:
    """Look at the files of rows, those of auxiliary inputs (in `columns`) included. Contents are read where only the
    time differs, of `MOST_READ` rows at most; with `every_content` of all rows."""
    local = np.flatnonzero(then.sizes >= 0)
    with ThreadPoolExecutor(_READERS) as readers:
        places = [files_of(table, int(row), columns) for row in then.rows[local].tolist()]
        now = np.array(list(readers.map(file_facts, places)), np.int64).reshape(-1, 2)
        is_there = now[:, 0] >= 0
        is_resized = is_there & (now[:, 0] != then.sizes[local])
        to_read = is_there & ~is_resized & (every_content | (now[:, 1] != then.times[local]))
        readable = np.flatnonzero(to_read & (then.digests[local] != UNKNOWN_DIGEST))
        read = readable if every_content else readable[spread(len(readable), MOST_READ)]
        digests = np.array(list(readers.map(file_digest, [places[i] for i in read.tolist()])), np.uint64)
    is_rewritten = np.zeros(len(local), bool)
    is_rewritten[read[digests != then.digests[local][read]]] = True
    is_unknown = to_read & (now[:, 1] != then.times[local])
    is_unknown[read] = False
    rows = then.rows[local]
    lists = [tuple(rows[mask].tolist()) for mask in (is_resized, is_rewritten, is_unknown, ~is_there)]
    return FileChanges(int(is_there.sum()), *lists)


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` of `count` places, evenly spread: int64."""
    return np.unique(np.linspace(0, max(0, count - 1), most).astype(np.int64))[:count]


def first_paths(table: ClipTable | MixedTable, rows: Sequence[int], shown: int = 3) -> str:
    """Paths of the first rows as the table has them, and how many more there are."""
    more = f" and {len(rows) - shown} more" if len(rows) > shown else ""
    return ", ".join(table.written_path(row) for row in rows[:shown]) + more
