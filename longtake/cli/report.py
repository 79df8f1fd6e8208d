"""`longtake report RUN`: what a run did, as one page; `longtake report RUN RUN`: several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longtake.contracts import UserError

_NOTE = "What the runs are to show, such as 'we test if ...'; it is kept in their folders. '' takes it away."


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The folder of a run, also of one that is training; or of several."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page to write; default: report.html in RUN, comparison.html in the first."
        ),
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Folder of videos that it made; default: samples in RUN, if there.")
    ] = None,
    note: Annotated[str | None, typer.Option(help=_NOTE)] = None,
) -> None:
    """Write what RUN did as one HTML page: settings, curves, data used and lost, time by part, samples, how to go on.

    Of several runs: their figures side by side, the settings that differ, curves at equal steps and at equal GPU-hours,
    failures by node. The page needs nothing else, and asks nothing of a network.
    """
    from longtake.track.progress import make_console
    from longtake.train.report import read_record, write_note, write_report

    if len(runs) > 1 and samples is not None:
        raise UserError(f"--samples {samples}: is for one RUN; leave it out, or give one of the {len(runs)}")
    records = [read_record(run) for run in runs]
    if note is not None:
        for run in runs:
            write_note(run, note)
        records = [read_record(run) for run in runs]
    if len(runs) > 1:
        from longtake.train.compare import write_comparison

        target = output or runs[0] / "comparison.html"
        write_comparison(target, records)
    else:
        own = runs[0] / "samples"
        target = output or runs[0] / "report.html"
        write_report(target, records[0], samples or (own if own.is_dir() else None))
    make_console().print(f"page: {target}")
