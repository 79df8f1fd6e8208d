"""`longtake now RUN sample|save|stop`: asks a run that trains for it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Wanted(StrEnum):
    """What may be asked of a run, in the words of the command line."""

    SAMPLE = "sample"
    SAVE = "save"
    STOP = "stop"


def now(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that trains.")],
    what: Annotated[
        Wanted, typer.Argument(help="sample: a validation; save: a checkpoint; stop: a checkpoint, and the end.")
    ],
) -> None:
    """Ask a run that trains for a validation, a checkpoint, or to stop. It looks for this at the end of each step."""
    from longtake.train.asking import ask_run

    print(ask_run(run, what))
