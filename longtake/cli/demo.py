"""`longtake demo`: everything once, on made-up clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake import demo as whole
from longtake import track
from longtake.contracts import EXIT_INTERRUPTED


def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="Where everything goes. What is finished there is kept.")] = Path(
        "outputs/demo"
    ),
) -> int:
    """Make clips, train a small model on them, generate, judge and report: minutes on a laptop's CPU.

    An interrupted demo goes on where it stopped; beside a finished one a new, numbered folder is made. --key value
    changes the training run, as in `longtake train` (its config is the preset demo/shapes).
    """
    outcome = whole.run_demo(folder, track.make_console(), list(context.args))
    return EXIT_INTERRUPTED if outcome.stopped else 0
