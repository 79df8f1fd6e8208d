"""`longtake generate RUN --prompt "..." [--key value ...]`."""

from __future__ import annotations

from functools import partial

import typer

from longtake.cli.options import OPEN_ENDED, run_and_overrides
from longtake.generate import generate as generate_videos
from longtake.generate import open_system, resolve_source
from longtake.parallel import start_world
from longtake.track import make_console


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""

    @app.command(context_settings=OPEN_ENDED)
    def generate(context: typer.Context, run: str = typer.Argument(None, metavar="RUN")) -> None:
        """Make videos. RUN is a training run, a checkpoint, an exported .safetensors file, or a config file.

        Prompts: --prompt "..." or --prompts FILE (.txt, .csv). Often used: --save-dir, --grid, --num-sample,
        --sampling_option.seed, --sampling_option.num_frames.
        """
        source = resolve_source(*run_and_overrides(context, run, "generate"))
        out = make_console()
        with start_world(source.config.device) as world:
            say = partial(out.print, markup=False) if world.is_main else _silent
            videos = generate_videos(open_system(source, world, say), source.config, world, say)
        if world.is_main:
            for video in videos:
                out.print(f"{video.path}  seed {video.seed}  {video.prompt.text}", markup=False)


def _silent(text: str) -> None:
    """What other ranks say."""
