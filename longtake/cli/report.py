"""`longtake report RUN`: what a run did, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake import track, train


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, also of one that is training.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page to write; default: report.html in RUN.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Folder of videos that it made; default: samples in RUN, if there.")
    ] = None,
) -> None:
    """Write what RUN did as one HTML page: settings, curves, data used and lost, time by part, samples, how to go on.

    The page needs nothing else, and asks nothing of a network.
    """
    own = run / "samples"
    target, record = output or run / "report.html", train.read_record(run)
    train.write_report(target, record, samples or (own if own.is_dir() else None))
    track.make_console().print(f"page: {target}")
