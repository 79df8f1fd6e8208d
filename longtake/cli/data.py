"""`longtake data ...`: clip tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from longtake.cli import data_encode, data_tables
from longtake.cli.console import Counted
from longtake.cli.options import OPEN_ENDED, CacheFolder, CacheSize, Root, file_cache, group, read_part

app = group("Clip tables: make, filter, join and look at them.")
for verb in (data_tables.shard, data_tables.filter_rows, data_tables.merge, data_tables.split, data_tables.captions):
    app.command(verb.__name__.removesuffix("_rows"))(verb)
app.command(context_settings=OPEN_ENDED)(data_tables.stats)
app.command("encode", context_settings=OPEN_ENDED)(data_encode.encode_verb)


@app.command()
def probe(
    table: Annotated[
        Path, typer.Argument(help="CSV, Parquet, Arrow, JSON(L) with a column `path`, usually `text`; or a folder.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json or .jsonl.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 works in this one (ray: one a core).")] = 0,
    root: Root = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any file is bad.")] = False,
    decode_check: Annotated[
        bool, typer.Option("--decode-check", help="Also decode every file, and leave out those that fail.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Do the I-th of N parts of the table, counted from 1.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="`ray` spreads the files over a Ray cluster.")
    ] = "local",
    cache_dir: CacheFolder = None,
    cache_gb: CacheSize = 20,
) -> None:
    """Fill in width, height, frames, fps and the rest from the files' headers, without decoding them.

    A file that cannot be used costs its row: it is listed with the reason in OUTPUT's name with .bad.csv. After an
    interruption the same command continues where it stopped.
    """
    from longtake.data.probing.probe import probe_table
    from longtake.track.progress import make_console

    cache, console = file_cache(cache_dir, cache_gb), make_console()
    with Counted(console, "probing", "probed", "files") as shown:
        result = probe_table(
            table,
            output,
            workers=workers,
            root=root,
            strict=strict,
            decode_check=decode_check,
            part=None if part is None else read_part(part),
            engine=engine,
            cache=cache,
            progress=shown.update,
            warn=lambda said: console.print(f"warning: {said}", style="yellow"),
        )
    if result.continued:
        console.print(f"{result.continued} were probed before")
    console.print(f"{result.kept} clips in {result.target}")
    if result.bad:
        warning = f"warning: {result.bad} bad {'file' if result.bad == 1 else 'files'} left out, listed with reasons in"
        console.print(f"{warning} {result.bad_path}", style="yellow")
