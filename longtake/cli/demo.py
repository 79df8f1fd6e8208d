"""`longtake demo`: everything once, on made-up clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    from longtake.demo.together import ALL, run_all
    from longtake.track.progress import make_console

    outputs, console, words = Path("outputs"), make_console(), list(context.args)
    if system == ALL:
        outcome = run_all(folder or outputs, console, words)
    else:
        from longtake.demo.place import usual_name
        from longtake.demo.start import run_demo

        outcome = run_demo(folder or outputs / usual_name(system), console, words, system=system)
    return EXIT_INTERRUPTED if outcome.stopped else 0
