"""`longtake demo`: everything once, on made-up clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.options import OPEN_ENDED
from longtake.demo import run_demo
from longtake.track import make_console
from longtake.train import EXIT_INTERRUPTED


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def demo(
        context: typer.Context,
        folder: Annotated[Path, typer.Option(help="Where everything goes. What is finished there is kept.")] = Path(
            "outputs/demo"
        ),
    ) -> int:
        """Make clips, train a small model on them, generate, judge and report: minutes on a laptop's CPU.

        An interrupted demo goes on where it stopped; beside a finished one a new, numbered folder is made. --key value
        changes the training run, as in `longtake train` (its config is longtake/demo/shapes.py).
        """
        outcome = run_demo(folder, make_console(), list(context.args))
        return EXIT_INTERRUPTED if outcome.stopped else 0
