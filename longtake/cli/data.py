"""`longtake data ...`: clip tables."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longtake.data import probe_table
from longtake.track import make_console

app = typer.Typer(help="Clip tables.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Clip tables."""


@app.command()
def probe(
    table: Path = typer.Argument(..., help="CSV or Parquet with a column `path`, and usually `text`."),
    output: Path = typer.Option(..., "--output", "-o", help="The table to write, .csv or .parquet."),
    workers: int = typer.Option(0, "--workers", min=0, help="Processes; 0 works in this one."),
    root: Path = typer.Option(None, "--root", help="Folder that relative paths start from; default: the table's."),
    strict: bool = typer.Option(False, "--strict", help="Fail if any file is bad."),
) -> None:
    """Fill in width, height, frames, fps and the rest from the files' headers, without decoding them."""
    out = make_console()
    columns = (TextColumn("probing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("probe", total=None)
        result = probe_table(
            table,
            output,
            workers=workers,
            root=root,
            strict=strict,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    out.print(f"{result.kept} clips in {output}", highlight=False)
    if result.bad:
        out.print(f"[yellow]warning:[/] {result.bad} bad files left out, listed with reasons in {result.bad_path}")
