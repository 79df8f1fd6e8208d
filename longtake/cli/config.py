"""`longtake config show RUN`: what a run would be, and where each value comes from."""

from __future__ import annotations

import typer

from longtake.cli.console import print_table
from longtake.cli.options import OPEN_ENDED, Run, group, run_and_overrides

app = group("Run files: what is in them.")


@app.command(context_settings=OPEN_ENDED)
def show(context: typer.Context, run: Run = None) -> None:
    """Print the resolved config of RUN, every value with the file and line, flag or default it comes from.

    RUN is a config file, of training or of generation, or the folder of a run; --key value overrides any key.
    """
    from longtake.api.shown import shown_keys
    from longtake.track.progress import make_console

    source, overrides = run_and_overrides(context, run, "config show")
    shown = shown_keys(source, overrides, context.obj)
    console = make_console()
    if console.is_terminal:
        print_table(console, ("key", "value", "from"), [(row.key, repr(row.value), row.origin) for row in shown.rows])
        if shown.ceiling is not None:
            console.print(shown.ceiling)
        return
    for row in shown.rows:  # one line each, for grep
        print(f"{row.key} = {row.value!r}  # {row.origin}")
    if shown.ceiling is not None:
        print(f"# {shown.ceiling}")
