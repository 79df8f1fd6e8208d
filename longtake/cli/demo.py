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
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes. What is finished there is kept.", show_default=False)
    ] = None,
    system: Annotated[str, typer.Option(help="What is trained: a name in `presets/demo`, or all.")] = "shapes",
) -> int:
    """Make clips, train a small model on them, generate, judge and report: minutes on a laptop's CPU.

    An interrupted demo goes on where it stopped; beside a finished one a new, numbered folder is made. --key value
    changes the training run, as in `longtake train` (its config is the preset demo/shapes). --system all runs the demo
    of each system that is not finished in the folder yet, and writes one page for all.
    """
    outputs, console, words = Path("outputs"), track.make_console(), list(context.args)
    if system == whole.ALL:
        outcome = whole.run_all(folder or outputs, console, words)
    else:
        outcome = whole.run_demo(folder or outputs / whole.usual_name(system), console, words, system=system)
    return EXIT_INTERRUPTED if outcome.stopped else 0
