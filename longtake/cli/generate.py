"""`longtake generate RUN --prompt "..." [--key value ...]`."""

from __future__ import annotations

import typer

from longtake import generate as generation
from longtake import parallel, track, train
from longtake.cli.options import Run, run_and_overrides


def generate(context: typer.Context, run: Run = None) -> None:
    """Make videos with RUN: a training run, a checkpoint, an exported .safetensors file, or a config file.

    Prompts: --prompt "..." or --prompts FILE (.txt: one a line; .csv: columns text, ref and others). Known frames:
    --cond-type i2v_head --ref picture.png. Often used: --save-dir, --grid, --num-sample, --negative-prompt,
    --motion-score, --ema False, --model.from_pretrained FILE OR FOLDER.

    --resolution, --aspect-ratio, --num-frames, --num-steps, --guidance, --guidance-img and --seed stand for the
    keys of sampling_option; --lora FILE --lora-scale 0.8 puts adapters upon the model. --tiny shrinks everything to
    a size that a CPU samples in seconds. Runs under torchrun too: prompts are shared out.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    words = run_and_overrides(context, run, "generate", "inference")
    source = generation.resolve_source(*words, dialect=context.obj)
    doubts = generation.check_request(source.config)
    console = track.make_console()
    with train.ended_by_signals(), parallel.start_world(source.config.device) as world:
        say = console.print if world.is_main else lambda line: None
        for line in doubts:
            say(line)
        live = world.is_main and console.is_terminal
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not live, transient=True) as bar:
            task = bar.add_task("generating", total=None)
            videos = generation.generate_from(
                source, world, say, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
    if world.is_main:
        for video in videos:
            console.print(f"{video.path}  seed {video.seed}  {video.prompt.text}")
