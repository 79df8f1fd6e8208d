"""What verbs share: the open-ended command line `VERB RUN [--key value ...]`, and help for a group without a verb."""

from __future__ import annotations

from typing import Annotated

import typer

from longtake.contracts import UserError

# Options that a verb does not know are left to the config system, which knows the keys. `--help` works anywhere.
OPEN_ENDED = {"allow_extra_args": True, "ignore_unknown_options": True}

Run = Annotated[str | None, typer.Argument(metavar="RUN", show_default=False)]


def run_and_overrides(context: typer.Context, run: str | None, verb: str) -> tuple[str, list[str]]:
    """RUN and the overrides behind it. Raises `UserError` where RUN is missing."""
    if run is None or run.startswith("--"):
        found = "nothing" if run is None else run
        raise UserError(f"{verb}: found {found} where RUN is expected; write `longtake {verb} RUN --key value`")
    return run, list(context.args)


def help_without_verb(context: typer.Context) -> None:
    """The callback of a group: prints its help where no verb follows."""
    if context.invoked_subcommand is None:
        if text := context.get_help():  # with rich, typer has printed it by now
            print(text)
        raise typer.Exit


def read_part(words: str) -> tuple[int, int]:
    """The two numbers of `--part I/N`. Raises `UserError` for other words."""
    number, slash, count = words.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise UserError(f"--part {words}: expected I/N, the number of the part and of all parts, such as 3/16")
    return int(number), int(count)
