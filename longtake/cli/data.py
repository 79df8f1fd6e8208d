"""`longtake data ...`: clip tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longtake.cli.options import help_without_verb
from longtake.data import probe_table
from longtake.track import make_console

app = typer.Typer(help="Clip tables: fill one in.", invoke_without_command=True, callback=help_without_verb)


@app.command()
def probe(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet with a column `path`, and usually `text`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The table to write: .csv, .parquet or .arrow.")],
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 works in this one.")] = 0,
    root: Annotated[
        Path | None, typer.Option(help="Folder that relative paths start from; default: the table's.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any file is bad.")] = False,
) -> None:
    """Fill in width, height, frames, fps and the rest from the files' headers, without decoding them.

    A file that cannot be used costs its row: it is listed with the reason in OUTPUT's name with .bad.csv.
    """
    console = make_console()
    columns = (TextColumn("probing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("probe", total=None)
        result = probe_table(
            table,
            output,
            workers=workers,
            root=root,
            strict=strict,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"{result.kept} clips in {output}", markup=False)
    if result.bad:
        warning = f"warning: {result.bad} bad {'file' if result.bad == 1 else 'files'} left out, listed with reasons in"
        console.print(f"{warning} {result.bad_path}", style="yellow", markup=False)
