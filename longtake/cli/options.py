"""How verbs that take a run share their command line: `VERB RUN [--key value ...]`."""

from __future__ import annotations

import typer

from longtake.contracts import UserError

# Everything after RUN is left to the config system, which knows the keys.
OPEN_ENDED = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run_and_overrides(context: typer.Context, run: str | None, verb: str) -> tuple[str, list[str]]:
    """RUN and the overrides behind it. Raises `UserError` where RUN is missing."""
    if run is None or run.startswith("--"):
        found = "nothing" if run is None else run
        raise UserError(f"longtake {verb}: found {found} where RUN is expected; write `longtake {verb} RUN --key value`")
    return run, list(context.args)
