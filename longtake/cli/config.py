"""`longtake config show RUN`: what a run would be, and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import typer

from longtake.cli.options import OPEN_ENDED, Run, help_without_verb, run_and_overrides
from longtake.cli.tables import print_table
from longtake.config import describe
from longtake.generate import read_generation
from longtake.track import make_console
from longtake.train import keys_of_generation, read_run

app = typer.Typer(help="Run files: what is in them.", invoke_without_command=True, callback=help_without_verb)


@app.command(context_settings=OPEN_ENDED)
def show(context: typer.Context, run: Run = None) -> None:
    """Print the resolved config of RUN, every value with the file and line, flag or default it comes from.

    RUN is a config file, of training or of generation, or the folder of a run; --key value overrides any key.
    """
    source, overrides = run_and_overrides(context, run, "config show")
    path = Path(source)
    of_generation = path.is_file() and keys_of_generation(path)
    rows = describe(read_generation(path, overrides) if of_generation else read_run(source, overrides))
    console = make_console()
    if console.is_terminal:
        print_table(console, ("key", "value", "from"), [(row.key, repr(row.value), row.origin) for row in rows])
        return
    for row in rows:  # one line each, for grep
        print(f"{row.key} = {row.value!r}  # {row.origin}")
