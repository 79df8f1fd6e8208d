"""`longtake watch RUN...`: validations of a run's checkpoints beside it, alarms, and a page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.options import finite
from longtake.contracts import UserError


def watch_runs(
    words: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, then overrides as in --validation.clips 16.")
    ],
    once: Annotated[bool, typer.Option("--once", help="What there is now; do not wait for more.")] = False,
    every: Annotated[float, typer.Option(callback=finite, min=0.1, help="Seconds between two looks.")] = 30.0,
    device: Annotated[str, typer.Option(help="auto: a GPU that nobody uses, or the CPU as the run.")] = "auto",
    metrics: Annotated[
        str | None, typer.Option(help="Command that gets a folder of videos and prints a JSON object of numbers.")
    ] = None,
    on_alarm: Annotated[str | None, typer.Option(help="Command that gets each alarm as JSON.")] = None,
    pick: Annotated[str, typer.Option(help="Which checkpoints: all, last, last:STEP or first-of-pass.")] = "all",
    wandb_run: Annotated[str | None, typer.Option(help="Id of a W&B run, or `new`; default: the run's own.")] = None,
    webhook: Annotated[str | None, typer.Option(help="Address that gets each alarm as JSON, by POST.")] = None,
) -> None:
    """Validate the checkpoints of runs while they train, newest first, and raise alarms on their curves.

    Runs on this machine or another that sees the folders, where a GPU is free; otherwise it leaves validations to the
    run, and says so. Writes watch.html, curves for TensorBoard and Weights & Biases, and alarms.jsonl.
    """
    from longtake.track.progress import make_console
    from longtake.watch.watching import WatchOptions
    from longtake.watch.watching import watch_runs as watch_all

    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    runs = [Path(word) for word in words[:first]]
    if not runs:
        raise UserError("watch: found no RUN; write `longtake watch outputs/NAME`")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: choose auto, cuda or cpu")
    if not re.fullmatch(r"all|last(:[0-9]{1,18})?|first-of-pass", pick):
        raise UserError(f"--pick {pick}: choose all, last, last:STEP or first-of-pass")
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise UserError(f"--webhook {webhook}: is no address; write one such as https://hooks.example.org/longtake")
    options = WatchOptions(tuple(words[first:]), device, every, once, metrics, on_alarm, webhook, pick, wandb_run)
    os.nice(19 - os.nice(0))  # what trains here goes first
    watch_all(runs, options, lambda line: make_console().print(line, markup=False, soft_wrap=True))
