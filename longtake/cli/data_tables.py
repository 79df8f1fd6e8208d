"""`longtake data shard, filter, merge, split, stats`: tables made from tables, and what is in them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from longtake.cli.console import print_table
from longtake.cli.options import CacheFolder, CacheSize, Root, file_cache, run_and_overrides
from longtake.contracts import UserError
from longtake.durable import write_whole

if TYPE_CHECKING:
    from rich.console import Console

Table = Annotated[Path, typer.Argument(help="CSV, Parquet, Arrow, JSON, JSONL, or a folder of shards.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json(l).")]


def shard(
    table: Table,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write; default: TABLE's name with .shards.")
    ] = None,
) -> None:
    """Write TABLE as shards, so that a run leaves its numbers and texts on disk. Any size; read in parts.

    Train on the folder: --dataset.data_path videos.shards
    """
    from longtake.data.tables.convert import make_shards
    from longtake.track.progress import make_console

    target = output or table.with_name(f"{table.stem}.shards")
    console = make_console()
    begun = time.monotonic()
    with console.status("") as shown:
        done = make_shards(table, target, progress=lambda rows: shown.update(f"{rows:,} rows"))
    seconds = max(time.monotonic() - begun, 1e-3)
    size = f"{done.num_bytes / 1e6:,.1f} MB"
    console.print(f"{done.rows:,} rows in {done.folder}, {size}, {done.rows / seconds:,.0f} rows/s")
    if done.invalid:
        warning = f"warning: {done.invalid:,} rows cannot be used, and no run uses them"
        console.print(f"{warning}; `longtake data stats {shlex.quote(str(table))}` counts why", style="yellow")


def filter_rows(
    table: Table,
    output: Output,
    where: Annotated[
        list[str], typer.Option(help='SQL condition, such as "resolution >= 65536 AND fps > 8"; of several, all.')
    ],
) -> None:
    """Write the rows of TABLE that meet a condition. Their order and clip ids stay."""
    from longtake.data.tables.select import filter_table
    from longtake.track.progress import make_console

    condition = where[0] if len(where) == 1 else " AND ".join(f"({one}\n)" for one in where)  # one may end in a comment
    done = filter_table(table, output, condition)
    console = make_console()
    console.print(f"{done.kept:,} of {done.rows:,} rows kept, in {done.target}")
    _print_left_out(console, done.left_out, done.unreadable)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Two tables or more, or the parts of a probe, in order.")],
    output: Output,
    repeated: Annotated[
        Literal["refuse", "first", "rename"],
        typer.Option(help="Rows with the clip id of an earlier row: refuse them, keep the first, or rename them."),
    ] = "refuse",
) -> None:
    """Write several tables as one, one after the other. A column that one of them lacks is empty in its rows."""
    from longtake.data.tables.select import merge_tables
    from longtake.track.progress import make_console

    done = merge_tables(tables, output, repeated)
    console = make_console()
    console.print(f"{done.kept:,} rows of {len(tables)} tables in {done.target}")
    _print_left_out(console, done.left_out, done.unreadable)


def split(
    table: Table,
    output: Annotated[list[Path], typer.Option("--output", "-o", help="A table to write; give one for each fraction.")],
    fractions: Annotated[str, typer.Option(help="Shares of the rows, such as 0.98,0.02.")],
    by: Annotated[str | None, typer.Option(help="Column whose equal values stay together, such as path.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another split.")] = 0,
) -> None:
    """Split the rows of TABLE into several tables by clip id: rows added later move no others."""
    from longtake.data.tables.select import split_table
    from longtake.track.progress import make_console

    try:
        shares = [float(word) for word in fractions.split(",")]
    except ValueError as error:
        raise UserError(f"--fractions {fractions}: expected numbers with commas between, such as 0.98,0.02") from error
    console = make_console()
    parts = split_table(table, output, shares, by, seed)
    for done in parts:
        console.print(f"{done.kept:,} of {done.rows:,} rows in {done.target}")
    _print_left_out(console, parts[0].left_out, parts[0].unreadable)


def captions(
    table: Table,
    from_files: Annotated[bool, typer.Option("--from-files", help="Take the .txt files beside the clips.")] = False,
    find: Annotated[str | None, typer.Option(help="Text that --replace takes the place of, in every caption.")] = None,
    replace: Annotated[str, typer.Option(help="What stands in the place of --find.")] = "",
    prefix: Annotated[str, typer.Option(help="Put in front, such as a trigger word, where it is not yet.")] = "",
    edit: Annotated[bool, typer.Option("--edit", help="Open them in $EDITOR, a line for each clip.")] = False,
    column: Annotated[str, typer.Option(help="The column of the captions.")] = "text",
) -> None:
    """Change the captions of TABLE in place: from files, then --find, then --prefix, then in an editor."""
    from longtake.data.tables.captions import FromFiles, edit_captions
    from longtake.track.progress import make_console

    files = FromFiles()
    changes: list[Callable[[str, str], str]] = [files] if from_files else []
    if find:
        changes.append(lambda place, text: text.replace(find, replace))
    if prefix:
        from longtake.data.clips.captions import prefixed

        changes.append(lambda place, text: prefixed(text, prefix))
    if not (changes or edit):
        raise UserError(f"data captions {table}: nothing to change; add --from-files, --find, --prefix or --edit")
    changed, rows = edit_captions(table, changes, column, edit)
    console = make_console()
    if from_files:
        console.print(f"{files.count:,} of {rows:,} clips have a .txt file beside them")
        for clip, reason in files.unread.items():
            console.print(f"warning: the caption of {clip} stays: {reason}", style="yellow")
    console.print(f"{changed:,} of {rows:,} captions changed in {table}")


def _print_left_out(console: Console, left_out: Mapping[str, int], unreadable: Sequence[tuple[Path, int, str]]) -> None:
    for what, count in left_out.items():
        console.print(f"left out: {count:,} {what}")
    for table, row, reason in unreadable:
        console.print(f"cannot be read: row {row} of {table}: {reason}", soft_wrap=True)


def stats(
    context: typer.Context,
    table: Annotated[Path, typer.Argument(help="CSV, Parquet, Arrow, JSON, JSONL, or a folder of shards or clips.")],
    html: Annotated[Path | None, typer.Option(help="Also write a page with histograms and example clips.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Config file or folder of a run, or a preset: show how its buckets take TABLE.")
    ] = None,
    frames: Annotated[int, typer.Option(min=0, help="Example clips on the page.")] = 12,
    root: Root = None,
    cache_dir: CacheFolder = None,
    cache_gb: CacheSize = 20,
) -> None:
    """Show what is in TABLE: clips, hours, sizes, rates, captions, empty cells; with --run the buckets too.

    With --run, --key value overrides any key of the run. TABLE takes the place of the run's own table.
    """
    from longtake.data.tables.mix import table_and_root
    from longtake.data.tables.rows import folder_notes
    from longtake.data.tables.stats import column_rows, table_facts, table_stats
    from longtake.track.progress import make_console

    if run is None and context.args:
        raise UserError(f"data stats: there is no option {context.args[0]}; overriding a key of a run needs --run RUN")
    cache = file_cache(cache_dir, cache_gb)
    config = None
    if run is not None:
        from longtake.train.preview import read_previewed

        source, overrides = run_and_overrides(context, run, "data stats")
        config = read_previewed(source, table, overrides, context.obj)
    console = make_console()
    table, start = table_and_root(table, root)
    found = table_stats(table, examples=frames if html else 0)
    for note in folder_notes(table):
        console.print(f"warning: {note}", style="yellow")
    print_table(console, ("", ""), table_facts(found))
    for row, reason in found.first_invalid.items():
        console.print(f"row {row} cannot be used: {reason}", style="yellow")
    if (rest := sum(found.invalid.values()) - len(found.first_invalid)) > 0:
        console.print(f"and {rest:,} more rows", style="yellow")
    head = ("column", "empty", "min", "median", "mean", "max")
    print_table(console, head, column_rows(found), numbers=head[1:])
    if found.sampled < found.rows:
        console.print(f"medians are of {found.sampled:,} rows drawn at random")
    preview = None
    if config is not None:
        from longtake.train.preview import preview_buckets, preview_captions

        preview = preview_buckets(config, table)
        console.print(preview.text(), soft_wrap=True)
        for line in preview_captions(config):
            console.print(line, soft_wrap=True)
    if html is not None:
        from longtake.data.tables.stats_page import film_reader, stats_page
        from longtake.data.tables.table import base_folder

        start = found.folder if start is None else base_folder(table, start)
        write_whole(html, stats_page(found, film_reader(start, cache), preview and preview.picture()))
        console.print(f"page: {html}")
