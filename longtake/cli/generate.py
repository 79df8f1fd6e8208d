"""`longtake generate RUN --prompt "..." [--key value ...]`."""

from __future__ import annotations

from functools import partial

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from longtake.cli.options import OPEN_ENDED, Run, run_and_overrides
from longtake.generate import check_request, generate_from, resolve_source
from longtake.parallel import start_world
from longtake.track import make_console
from longtake.train import ended_by_signals


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def generate(context: typer.Context, run: Run = None) -> None:
        """Make videos with RUN: a training run, a checkpoint, an exported .safetensors file, or a config file.

        Prompts: --prompt "..." or --prompts FILE (.txt: one a line; .csv: columns text, ref, neg, name). Known frames:
        --cond-type i2v_head --ref picture.png. Often used: --save-dir, --grid, --num-sample, --negative-prompt,
        --motion-score, --ema False, --model.from_pretrained FILE OR FOLDER.

        --resolution, --aspect-ratio, --num-frames, --num-steps, --guidance, --guidance-img and --seed stand for the
        keys of sampling_option; --lora FILE --lora-scale 0.8 puts adapters upon the model. --tiny shrinks everything to
        a size that a CPU samples in seconds. Runs under torchrun too: prompts are shared out.
        """
        source = resolve_source(*run_and_overrides(context, run, "generate"), dialect=context.obj)
        doubts = check_request(source.config)
        console = make_console()
        with ended_by_signals(), start_world(source.config.device) as world:
            say = partial(console.print, markup=False) if world.is_main else _silent
            for line in doubts:
                say(line)
            live = world.is_main and console.is_terminal
            columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("videos"))
            columns += (TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
            with Progress(*columns, console=console, disable=not live, transient=True) as bar:
                task = bar.add_task("generate", total=None)
                videos = generate_from(
                    source, world, say, progress=lambda done, total: bar.update(task, completed=done, total=total)
                )
        if world.is_main:
            for video in videos:
                console.print(f"{video.path}  seed {video.seed}  {video.prompt.text}", markup=False)


def _silent(text: str) -> None:
    """What other ranks say."""
