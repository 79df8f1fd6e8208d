"""`longtake data shard, filter, merge, split, stats`: tables made from tables, and what is in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from longtake.cli.tables import print_table
from longtake.contracts import UserError
from longtake.data import (
    ClipError,
    column_rows,
    filter_table,
    make_shards,
    merge_tables,
    middle_frame,
    split_table,
    stats_page,
    table_facts,
    table_stats,
)
from longtake.data.clips.remote import FileCache, default_cache_folder, join_location
from longtake.data.tables.rows import open_rows
from longtake.track import make_console
from longtake.train import preview_buckets, read_run

Table = Annotated[Path, typer.Argument(help="CSV, Parquet, Arrow, JSON, JSONL, or a folder of shards.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json(l).")]


class Repeated(StrEnum):
    """What becomes of rows whose clip id an earlier row has."""

    refuse = "refuse"
    first = "first"
    rename = "rename"


def register(app: typer.Typer) -> None:
    """Adds the verbs to the group."""
    for verb in (shard, filter_rows, merge, split, stats):
        app.command(verb.__name__.split("_")[0])(verb)


def shard(
    table: Table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write; default: TABLE's name with .shards.")
    ] = None,
) -> None:
    """Write TABLE as shards, so that a run leaves its numbers and texts on disk. Any size; read in parts.

    Train on the folder: --dataset.data_path videos.shards
    """
    target = output or table.with_name(f"{table.stem}.shards")
    console = make_console()
    begun = time.monotonic()
    with console.status("") as shown:
        done = make_shards(table, target, progress=lambda rows: shown.update(f"{rows:,} rows"))
    seconds = max(time.monotonic() - begun, 1e-3)
    size = f"{done.num_bytes / 1e6:,.1f} MB"
    console.print(f"{done.rows:,} rows in {done.folder}, {size}, {done.rows / seconds:,.0f} rows/s", markup=False)
    if done.invalid:
        told = f"warning: {done.invalid:,} rows have numbers that make no sense; no run uses them"
        console.print(told, style="yellow", markup=False)


def filter_rows(
    table: Table,
    output: Output,
    where: Annotated[str, typer.Option(help='SQL condition, such as "resolution >= 65536 AND fps > 8".')],
) -> None:
    """Write the rows of TABLE that meet a condition. Their order and clip ids stay."""
    done = filter_table(table, output, where)
    make_console().print(f"{done.kept:,} of {done.rows:,} rows kept, in {done.target}", markup=False)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Two tables or more, or the parts of a probe, in order.")],
    output: Output,
    repeated: Annotated[
        Repeated,
        typer.Option(help="Rows with the clip id of an earlier row: refuse them, keep the first, or rename them."),
    ] = Repeated.refuse,
) -> None:
    """Write several tables as one, one after the other. A column that one of them lacks is empty in its rows."""
    done = merge_tables(tables, output, repeated.value)
    left = f", {done.rows - done.kept:,} repeated ones left out" if done.kept < done.rows else ""
    console = make_console()
    console.print(f"{done.kept:,} rows of {len(tables)} tables in {done.target}{left}", markup=False)


def split(
    table: Table,
    output: Annotated[list[Path], typer.Option("--output", "-o", help="A table to write; give one for each fraction.")],
    fractions: Annotated[str, typer.Option(help="Shares of the rows, such as 0.98,0.02.")],
    by: Annotated[str | None, typer.Option(help="Column whose equal values stay together, such as path.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another split.")] = 0,
) -> None:
    """Deal the rows of TABLE out to several tables, by their clip ids: rows added later move no others."""
    try:
        shares = [float(word) for word in fractions.split(",")]
    except ValueError as error:
        raise UserError(f"--fractions {fractions}: expected numbers with commas between, such as 0.98,0.02") from error
    console = make_console()
    for done in split_table(table, output, shares, by, seed):
        console.print(f"{done.kept:,} of {done.rows:,} rows in {done.target}", markup=False)


def stats(
    table: Table,
    html: Annotated[Path | None, typer.Option(help="Also write a page with histograms and example frames.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Config file or folder of a run: show how its buckets take TABLE.")
    ] = None,
    frames: Annotated[int, typer.Option(min=0, help="Example frames on the page.")] = 12,
    root: Annotated[Path | None, typer.Option(help="Folder that relative paths start from; default: TABLE's.")] = None,
) -> None:
    """Show what is in TABLE: clips, hours, sizes, rates, captions, empty cells; with --run the buckets too."""
    config = None if run is None else read_run(run).value
    console = make_console()
    found = table_stats(table, examples=frames if html else 0)
    print_table(console, ("", ""), table_facts(found))
    head = ("column", "empty", "min", "median", "mean", "max")
    print_table(console, head, column_rows(found), numbers=head[1:])
    if found.sampled < found.rows:
        console.print(f"medians are of {found.sampled:,} rows drawn at random", markup=False)
    report = None if config is None else preview_buckets(config, table).text()
    if report is not None:
        console.print(report, markup=False, soft_wrap=True)
    if html is not None:
        start = root or open_rows(table).folder
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(stats_page(found, _frame_reader(start), report), encoding="utf-8")
        console.print(f"page: {html}", markup=False)


def _frame_reader(start: Path | str) -> Callable[[str], np.ndarray]:
    """Reads the middle frame of a clip by its path as written."""
    cache = FileCache(default_cache_folder())

    def read(path: str) -> np.ndarray:
        if not path:
            raise ClipError("path is empty")
        with cache.local(join_location(start, path)) as file:
            return middle_frame(file)

    return read
