"""`longtake preset`: the run files that are installed, and a copy of one to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.console import print_table
from longtake.cli.options import GROUP
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.presets import copied, find_preset, nearest_preset, presets

VERBS = {"train": "train", "inference": "generate"}

app = typer.Typer(context_settings=GROUP)


@app.callback(invoke_without_command=True)
def list_all(context: typer.Context) -> None:
    """Run files that are installed: what each is for, and the GPUs that its forecast is for.

    Other verbs take them by name from any folder: `longtake train opensora_v2/stage1`. `longtake plan NAME` says what
    one needs, `longtake config show NAME` what is in it, `longtake preset copy NAME` writes it here to be changed.
    """
    if context.invoked_subcommand is None:
        show()


@app.command("list")
def show() -> None:
    """List the presets, as `longtake preset` alone does."""
    from longtake.track.progress import make_console

    rows = [(one.name, VERBS[one.kind], one.gpus, one.about) for one in presets()]
    print_table(make_console(), ("preset", "verb", "GPUs", "what"), rows)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A preset, as `longtake preset` lists them.")],
    to: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="The file to write; default: the preset's name, here.")
    ] = None,
) -> None:
    """Copy a preset to your own file. It keeps inheriting from the installed presets."""
    from longtake.track.progress import make_console

    if (path := find_preset(name)) is None:
        hint = f"did you mean {near}?" if (near := nearest_preset(name)) else "`longtake preset` lists them"
        raise UserError(f"{name}: is no preset; {hint}")
    target = Path(to or path.name)
    if target.is_dir() or (to or "").endswith("/"):
        target = target / path.name
    if target.suffix != ".py":
        own = target.with_suffix(".py")
        raise UserError(
            f"{target}: a run file in Python's notation ends in .py; write {own}, or {target}/ for a folder"
        )
    if target.exists():
        raise UserError(f"{target}: exists already and is not overwritten; choose another name")
    write_whole(target, copied(path, str(target)))
    make_console().print(str(target))
