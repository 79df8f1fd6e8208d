"""Clip tables: `probe` writes one, `Table` reads one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.contracts import UserError

if TYPE_CHECKING:
    from longtake.data.tables.stats import TableStats
    from longtake.data.tables.table import ClipTable

PathLike = str | os.PathLike[str]


class Table:
    """A probed clip table on disk: a row per clip, with its path, caption, frames, height, width and frame rate.

        table = longtake.Table("clips.parquet")
        print(len(table), table.stats.seconds)
        run = longtake.Run.preset("custom").set({"dataset.data_path": table.path})

    `bad`: (row, path, reason) of the files that `probe` left out; empty for a table that was opened by its path.
    """

    def __init__(self, path: PathLike, bad: tuple[tuple[int, str, str], ...] = ()) -> None:
        """`path`: CSV, Parquet, Arrow, JSON or JSONL, or a folder of shards. Raises `Error` where there is none."""
        self.path = Path(path)
        self.bad = tuple(bad)
        if not self.path.exists():
            raise UserError(f"{self.path}: expected a clip table, found nothing there; write one with longtake.probe")

    @cached_property
    def clips(self) -> ClipTable:
        """The rows that a run can use, in memory. Raises `Error` for a table that cannot be read."""
        from longtake.data.tables.table import ClipTable

        return ClipTable.open(self.path)

    @cached_property
    def stats(self) -> TableStats:
        """Clips, seconds, sizes and captions, as `longtake data stats` prints them."""
        from longtake.data.tables.stats import table_stats

        return table_stats(self.path)

    def __repr__(self) -> str:
        return f"Table({str(self.path)!r})"

    def __len__(self) -> int:
        """Rows that a run can use."""
        return len(self.clips)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(path, caption) of each row, in the order of the table; paths are absolute, or URLs."""
        clips = self.clips
        return ((clips.location(row), clips.caption(row)) for row in range(len(clips)))


def probe(
    source: PathLike,
    output: PathLike,
    *,
    workers: int = 0,
    root: PathLike | None = None,
    strict: bool = False,
    decode_check: bool = False,
) -> Table:
    """Read the headers of the clips in a folder or table and write the completed table to `output`.

        table = longtake.probe("clips/", "clips.parquet")
        print(len(table), "clips,", len(table.bad), "files left out")

    The same as `longtake data probe`: `workers` are processes (0: this one), `root` is where relative paths start,
    `strict` fails if any file is bad, `decode_check` also decodes every file. Returns the table written. Raises `Error`
    where `source` has no usable clip; the output is then not written.
    """
    from longtake.data.probing.probe import probe_table

    result = probe_table(source, output, workers=workers, root=root, strict=strict, decode_check=decode_check)
    return Table(result.target, result.bad_rows)
