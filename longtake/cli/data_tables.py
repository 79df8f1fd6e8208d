"""`longtake data shard, filter, merge, split, stats`: tables made from tables, and what is in them."""

from __future__ import annotations

import math
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.options import OPEN_ENDED
from longtake.cli.tables import print_table
from longtake.contracts import UserError
from longtake.data import (
    FileCache,
    base_folder,
    column_rows,
    default_cache_folder,
    filter_table,
    frame_reader,
    make_shards,
    merge_tables,
    split_table,
    stats_page,
    table_facts,
    table_stats,
)
from longtake.durable import write_whole
from longtake.track import make_console
from longtake.train import preview_buckets, read_previewed

Table = Annotated[Path, typer.Argument(help="CSV, Parquet, Arrow, JSON, JSONL, or a folder of shards.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json(l).")]


class Repeated(StrEnum):
    """What becomes of rows whose clip id an earlier row has."""

    refuse = "refuse"
    first = "first"
    rename = "rename"


def register(app: typer.Typer) -> None:
    """Adds the verbs to the group."""
    for verb in (shard, filter_rows, merge, split):
        app.command(verb.__name__.split("_")[0])(verb)
    app.command(context_settings=OPEN_ENDED)(stats)


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
    context: typer.Context,
    table: Table,
    html: Annotated[Path | None, typer.Option(help="Also write a page with histograms and example frames.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Config file or folder of a run: show how its buckets take TABLE.")
    ] = None,
    frames: Annotated[int, typer.Option(min=0, help="Example frames on the page.")] = 12,
    root: Annotated[
        str | None, typer.Option(help="Folder or URL that relative paths start from; default: TABLE's folder.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for files fetched from servers; default: in the user's cache folder.")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Size of that folder, GB.")] = 20,
) -> None:
    """Show what is in TABLE: clips, hours, sizes, rates, captions, empty cells; with --run the buckets too.

    With --run, --key value overrides any key of the run. TABLE takes the place of the run's own table.
    """
    if run is None and context.args:
        raise UserError(f"data stats: there is no option {context.args[0]}; overriding a key of a run needs --run RUN")
    if not 0 <= cache_gb < math.inf:
        raise UserError(f"--cache-gb {cache_gb:g}: must be a size in GB, 0 or more, such as 20")
    config = None if run is None else read_previewed(run, table, context.args)
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
        start = found.folder if root is None else base_folder(table, root)
        cache = FileCache(cache_dir or default_cache_folder(), int(cache_gb * 1e9))
        write_whole(html, stats_page(found, frame_reader(start, cache), report))
        console.print(f"page: {html}", markup=False)
