"""`longtake generate RUN --prompt "..." [--key value ...]`."""

from __future__ import annotations

from functools import partial

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longtake.cli.options import OPEN_ENDED, Run, run_and_overrides
from longtake.generate import check_request, open_system, resolve_source
from longtake.generate import generate as generate_videos
from longtake.parallel import start_world
from longtake.track import make_console


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def generate(context: typer.Context, run: Run = None) -> None:
        """Make videos with RUN: a training run, a checkpoint, an exported .safetensors file, or a config file.

        Prompts: --prompt "..." or --prompts FILE (.txt: one a line; .csv: columns text, name, neg). Often used:
        --save-dir, --grid, --num-sample, --negative-prompt, --sampling_option.seed, --sampling_option.num_frames,
        --sampling_option.aspect_ratio, --ema False. Runs under torchrun too: prompts are shared out.
        """
        source = resolve_source(*run_and_overrides(context, run, "generate"))
        check_request(source.config)
        console = make_console()
        with start_world(source.config.device) as world:
            say = partial(console.print, markup=False) if world.is_main else _silent
            system = open_system(source, world, say)
            live = world.is_main and console.is_terminal
            columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("videos"))
            columns += (TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
            with Progress(*columns, console=console, disable=not live, transient=True) as bar:
                task = bar.add_task("generate", total=None)
                videos = generate_videos(
                    system,
                    source.config,
                    world,
                    say,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        if world.is_main:
            for video in videos:
                console.print(f"{video.path}  seed {video.seed}  {video.prompt.text}", markup=False)


def _silent(text: str) -> None:
    """What other ranks say."""
