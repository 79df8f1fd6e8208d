"""`longtake config show RUN`: what a run would be, and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import typer

from longtake.cli.console import print_table
from longtake.cli.options import OPEN_ENDED, Run, group, run_and_overrides

app = group("Run files: what is in them.")


@app.command(context_settings=OPEN_ENDED)
def show(context: typer.Context, run: Run = None) -> None:
    """Print the resolved config of RUN, every value with the file and line, flag or default it comes from.

    RUN is a config file, of training or of generation, or the folder of a run; --key value overrides any key.
    """
    from longtake.config.load import describe
    from longtake.track.progress import make_console
    from longtake.train.run_file import keys_of_generation, read_run

    source, overrides = run_and_overrides(context, run, "config show")
    path = Path(source)
    of_generation = path.is_file() and keys_of_generation(path, context.obj)
    if of_generation:
        from longtake.generate.read import read_generation

        rows = describe(read_generation(path, overrides, context.obj))
    else:
        from longtake.train.config import RunWithoutTable

        resolved = read_run(source, overrides, RunWithoutTable, context.obj)
        idle = {"lr"} if resolved.value.optim.schedule is not None else set()  # nothing reads it then
        rows = [row for row in describe(resolved) if row.key not in idle]
    ceiling = None if of_generation else resolved.value.ae.ceiling
    console = make_console()
    if console.is_terminal:
        print_table(console, ("key", "value", "from"), [(row.key, repr(row.value), row.origin) for row in rows])
        if ceiling is not None:
            console.print(ceiling)
        return
    for row in rows:  # one line each, for grep
        print(f"{row.key} = {row.value!r}  # {row.origin}")
    if ceiling is not None:
        print(f"# {ceiling}")
