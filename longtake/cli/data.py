"""`longtake data ...`: clip tables."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli import data_encode, data_tables
from longtake.cli.counted import Counted
from longtake.cli.options import help_without_verb, read_part
from longtake.contracts import UserError
from longtake.data import FileCache, default_cache_folder, probe_table
from longtake.track import make_console

app = typer.Typer(
    help="Clip tables: make, filter, join and look at them.", invoke_without_command=True, callback=help_without_verb
)
data_tables.register(app)
data_encode.register(app)


class Engine(StrEnum):
    """Who spreads the files over processes."""

    local = "local"
    ray = "ray"


@app.command()
def probe(
    table: Annotated[
        Path, typer.Argument(help="CSV, Parquet, Arrow, JSON(L) with a column `path`, usually `text`; or a folder.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet, .arrow, .json or .jsonl.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 works in this one (ray: one a core).")] = 0,
    root: Annotated[
        str | None, typer.Option(help="Folder or URL that relative paths start from; default: the table's folder.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any file is bad.")] = False,
    decode_check: Annotated[
        bool, typer.Option("--decode-check", help="Also decode every file, and leave out those that fail.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Do the I-th of N parts of the table, counted from 1.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="`ray` spreads the files over a Ray cluster.")] = Engine.local,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for files fetched from servers; default: in the user's cache folder.")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Size of that folder, GB.")] = 20,
) -> None:
    """Fill in width, height, frames, fps and the rest from the files' headers, without decoding them.

    A file that cannot be used costs its row: it is listed with the reason in OUTPUT's name with .bad.csv. After an
    interruption the same command continues where it stopped.
    """
    if not 0 <= cache_gb < math.inf:
        raise UserError(f"--cache-gb {cache_gb:g}: must be a size in GB, 0 or more, such as 20")
    console = make_console()
    with Counted(console, "probing", "probed", "files") as shown:
        result = probe_table(
            table,
            output,
            workers=workers,
            root=root,
            strict=strict,
            decode_check=decode_check,
            part=None if part is None else read_part(part),
            engine=engine.value,
            cache=FileCache(cache_dir or default_cache_folder(), int(cache_gb * 1e9)),
            progress=shown.update,
            warn=lambda said: console.print(f"warning: {said}", style="yellow", markup=False),
        )
    if result.continued:
        console.print(f"{result.continued} were probed before", markup=False)
    console.print(f"{result.kept} clips in {result.target}", markup=False)
    if result.bad:
        warning = f"warning: {result.bad} bad {'file' if result.bad == 1 else 'files'} left out, listed with reasons in"
        console.print(f"{warning} {result.bad_path}", style="yellow", markup=False)
