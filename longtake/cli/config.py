"""`longtake config show RUN`: what a run would be, and where each value comes from."""

from __future__ import annotations

import typer
from rich.table import Table

from longtake.cli.options import OPEN_ENDED, run_and_overrides
from longtake.config import describe
from longtake.track import make_console
from longtake.train import read_run

app = typer.Typer(help="Run files.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run files."""


@app.command(context_settings=OPEN_ENDED)
def show(context: typer.Context, run: str = typer.Argument(None, metavar="RUN")) -> None:
    """Print the resolved config of RUN, every value with the file and line, flag or default it comes from."""
    resolved = read_run(*run_and_overrides(context, run, "config show"))
    out = make_console()
    if not out.is_terminal:  # one plain line each, for grep
        for row in describe(resolved):
            print(f"{row.key} = {row.value}  # {row.origin}")
        return
    table = Table("key", "value", "from", box=None, header_style="bold")
    for row in describe(resolved):
        table.add_row(row.key, row.value, row.origin)
    out.print(table)
