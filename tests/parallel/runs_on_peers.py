"""A whole run by peers: trained by four that share every micro-batch, continued by four that do not, sampled from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longtake.generate import generate, open_system, read_video, resolve_source
from longtake.parallel import World
from longtake.train import read_run, train
from tests.parallel.one_step import Facts
from tests.train.runs import metrics

PEERS = ("--parallel.sequence", "2", "--parallel.tensor", "2")
NO_PEERS = ("--parallel.sequence", "1", "--parallel.tensor", "1")
SAMPLING = ("--sampling-option.resolution", "32px", "--sampling-option.num-frames", "8")
PROMPTS = ("a red circle moves left", "a blue square moves up", "a red square moves right")
FIRST, STEPS = 3, 5


def play_run(config: Path, name: str, world: World) -> Facts:
    """Trains `FIRST` steps, goes on to `STEPS` on another mesh, samples; what rank 0 can compare."""
    peers, no_peers = (PEERS, NO_PEERS) if world.size > 1 else ((), ())
    folder = _train(str(config), world, "--exp-name", name, "--max-steps", str(FIRST), *peers)
    _train(str(folder), world, "--max-steps", str(STEPS), *no_peers)
    flags = [*SAMPLING, *peers, "--sampling-option.num-steps", "2", "--save-dir", str(folder / "samples")]
    source = resolve_source(str(folder), [*flags, "--prompt", str(list(PROMPTS))])
    system = open_system(source, world, lambda text: None)
    videos = generate(system, source.config, world, lambda text: None)
    return {"lines": metrics(folder), "videos": [_checked(video.path) for video in videos]}


def _train(source: str, world: World, *overrides: str) -> Path:
    config = read_run(source, ["--slots-per-step", "2", *overrides]).value
    return train(config, world, source, Console(file=io.StringIO())).folder


def _checked(path: Path) -> list[Any]:
    """A video as numbers small enough to hand over: means of 4 x 4 tiles of its frames."""
    frames = torch.from_numpy(read_video(path)).float().movedim(-1, 1)
    return torch.nn.functional.avg_pool2d(frames, frames.shape[-1] // 4).flatten().tolist()
