"""`longtake doctor RUN [--key value ...]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.console import print_table
from longtake.cli.options import Run, run_and_overrides
from longtake.doctor.finding import UNTRAINED
from longtake.durable import write_whole


def doctor(
    context: typer.Context,
    run: Run = None,
    clips: Annotated[int, typer.Option(min=1, max=64, help="Clips to look at, of one bucket.")] = 16,
    quick: Annotated[bool, typer.Option("--quick", help="Train on no clip: seconds instead of minutes.")] = False,
    ema: Annotated[bool, typer.Option(help="Look at the averaged weights, where the run has them.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was found as data.")] = None,
) -> int:
    """Find why a model makes noise, or a run is slow: checks of data, encoders, weights and training, causes ranked.

    RUN: the folder of a run, one of its checkpoints, or a config file with the weights that it would start from.
    Works on one device. Ends with status 0 where nothing is wrong, else with 1. --key value overrides any key.
    """
    from longtake.doctor.run import examine
    from longtake.track.progress import make_console, task_progress

    source, overrides = run_and_overrides(context, run, "doctor")
    console = make_console()
    with task_progress(console, "checks") as show:
        found = examine(
            source,
            overrides,
            clips=clips,
            quick=quick,
            ema=ema,
            dialect=context.obj,
            on_progress=show,
        )
    if json_file is not None:
        write_whole(json_file, json.dumps(found.to_json(), indent=1) + "\n")
    if found.checkpoint is not None:
        console.print(f"weights: {found.checkpoint}", markup=False)
    elif Path(source).is_dir():
        said = f"no complete checkpoint in {source} yet (`longtake now {source} save` asks a running run for one)"
        console.print(f"{said}: the model is looked at as it was at the start", markup=False)
    print_table(
        console, ("check", "verdict", "figure"), [(one.name, one.verdict, one.figure) for one in found.findings]
    )
    if not found.causes:
        said = "a clean bill: nothing here makes noise, or the run slow"
        untrained = any(one.figure == UNTRAINED for one in found.findings)
        console.print(f"{said}; what it makes of clips can be looked at once it has trained" if untrained else said)
        return 0
    for number, one in enumerate(found.causes, 1):
        console.print(f"{number}. {one.cause} ({one.name}): {one.advice}", markup=False)
    return 1
