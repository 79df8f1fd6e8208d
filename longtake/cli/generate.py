"""`longtake generate RUN --prompt "..." [--key value ...]`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from longtake.cli.options import Run, run_and_overrides

_Plan = Annotated[bool, typer.Option("--plan", help="Make nothing; say how long it would take, and the memory.")]
_Gpus = Annotated[int, typer.Option(min=1, help="With --plan: GPUs of the whole job.")]
_Kind = Annotated[str | None, typer.Option(help="With --plan: their kind; default: the one here, or h200.")]


def generate(context: typer.Context, run: Run = None, plan: _Plan = False, gpus: _Gpus = 1, gpu: _Kind = None) -> None:
    """Make videos with RUN: a training run, a checkpoint, an exported .safetensors file, or a config file.

    Prompts: --prompt "..." or --prompts FILE (.txt: one a line; .csv: columns text, ref and others). Known frames:
    --cond-type i2v_head --ref picture.png. Often used: --save-dir, --grid, --num-sample, --negative-prompt,
    --motion-score, --ema False, --model.from_pretrained FILE OR FOLDER.

    --resolution, --aspect-ratio, --num-frames, --num-steps, --guidance, --guidance-img and --seed stand for the
    keys of sampling_option; --lora FILE --lora-scale 0.8 puts adapters upon the model. --tiny shrinks everything to
    a size that a CPU samples in seconds. Runs under torchrun too: prompts are shared out,
    and fewer prompts than processes are each made by several together.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from longtake.generate.checks import check_request
    from longtake.generate.run import generate_from
    from longtake.generate.source import resolve_source
    from longtake.parallel.world import start_world
    from longtake.track.progress import make_console
    from longtake.train.health.interrupt import ended_by_signals

    words = run_and_overrides(context, run, "generate", "inference")
    source = resolve_source(*words, dialect=context.obj)
    console = make_console()
    if plan:
        from longtake.generate.requests import prompts_of
        from longtake.plan.video import machine_named, video_words

        config = source.config
        prompts = prompts_of(config) if config.prompt or config.prompts else ()
        return console.print(video_words(config, machine_named(gpu), gpus, prompts))
    doubts = check_request(source.config)
    with ended_by_signals(), start_world(source.config.device) as world:
        say = console.print if world.is_main else lambda line: None
        for line in doubts:
            say(line)
        live = world.is_main and console.is_terminal
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not live, transient=True) as bar:
            task = bar.add_task("generating", total=None)
            told = world.is_main and not live and bool(os.environ.get("LONGTAKE_PROGRESS"))

            def show(done: float, total: int) -> None:
                bar.update(task, completed=done, total=total)
                if told:  # a program reads along, as `longtake ui` does
                    console.print(f"{done:.2f} of {total} videos")

            videos = generate_from(source, world, say, progress=show)
    if world.is_main:
        for video in videos:
            console.print(f"{video.path}  seed {video.seed}  {video.prompt.text}")
