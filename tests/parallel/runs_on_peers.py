"""Whole runs: by peers that share every micro-batch, then by others, and sampled from; saved once, then on any mesh."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console

from longtake.generate.run import generate, open_system
from longtake.generate.source import resolve_source
from longtake.parallel.world import World
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.ranks import Facts
from tests.train.runs import metrics

PEERS = ("--parallel.sequence", "2", "--parallel.tensor", "2")
NO_PEERS = ("--parallel.sequence", "1", "--parallel.tensor", "1")
SAMPLING = ("--sampling-option.resolution", "32px", "--sampling-option.num-frames", "8")
PROMPTS = ("a red circle moves left", "a blue square moves up", "a red square moves right")
FIRST, STEPS = 3, 5
SAVED_AT = "shard 2"
CONTINUED_ON = {  # processes -> meshes that a run saved at `SAVED_AT` is continued on
    1: {"one process": ()},
    2: {
        "tensor 2": ("--parallel.tensor", "2"),
        "sequence 2": ("--parallel.sequence", "2"),
        "replicate 2": ("--parallel.replicate", "2"),
    },
    4: {
        "shard 4": (),
        "replicate 2 x shard 2": ("--parallel.replicate", "2", "--parallel.shard", "2"),
        "sequence 4": ("--parallel.sequence", "4"),
        "sequence 2 x tensor 2": PEERS,
    },
}


def play_run(config: Path, name: str, world: World) -> Facts:
    """Trains `FIRST` steps, goes on to `STEPS` on another mesh, samples; what rank 0 can compare."""
    peers, no_peers = (PEERS, NO_PEERS) if world.size > 1 else ((), ())
    folder = _train(str(config), world, "--exp-name", name, "--max-steps", str(FIRST), *peers)
    _train(str(folder), world, "--max-steps", str(STEPS), *no_peers)
    flags = [*SAMPLING, *peers, "--sampling-option.num-steps", "2", "--save-dir", str(folder / "samples")]
    source = resolve_source(str(folder), [*flags, "--prompt", str(list(PROMPTS))])
    system = open_system(source, world, lambda text: None)
    frames = dict[str, list[np.ndarray]]()
    with mock.patch("longtake.generate.run.video_writer", partial(_written, frames)):
        videos = generate(system, source.config, world, lambda text: None)
    frames = {path: own for of_rank in world.gather(frames) for path, own in of_rank.items()}
    return {"lines": metrics(folder), "videos": [_tiles(frames[str(video.path)]) for video in videos]}


def save_once(config: Path, world: World) -> str:
    """Trains `FIRST` steps by two that hold a shard each, with a checkpoint; its folder."""
    return str(_train(str(config), world, "--exp-name", SAVED_AT.replace(" ", "_"), "--max-steps", str(FIRST)))


def continue_all(saved: str, world: World) -> dict[str, str]:
    """Goes on from copies of the run on every mesh of this many processes, to one step after `STEPS`; their folders."""
    folders = {}
    for name, flags in CONTINUED_ON[world.size].items():
        folder = Path(f"{saved}-on-{name.replace(' ', '_')}")
        if world.is_main:
            shutil.copytree(saved, folder)
        world.barrier()
        _train(str(folder), world, "--max-steps", str(STEPS + 1), *flags)
        folders[name] = str(folder)
    return folders


def _train(source: str, world: World, *overrides: str) -> Path:
    config = read_run(source, ["--slots-per-step", "2", *overrides]).value
    return train(config, world, source, Console(file=io.StringIO())).folder


@contextmanager
def _written(into: dict[str, list[np.ndarray]], path: Path, *_: Any) -> Iterator[Callable[[np.ndarray], None]]:
    """In place of `video_writer`: the frames before they are compressed, which makes much of a rounding."""
    path.touch()
    yield into.setdefault(str(path), []).append


def _tiles(chunks: list[np.ndarray]) -> list[float]:
    """A video as numbers small enough to hand over: means of 4 x 4 tiles of its frames."""
    frames = torch.from_numpy(np.concatenate(chunks)).float().movedim(-1, 1)
    return torch.nn.functional.avg_pool2d(frames, frames.shape[-1] // 4).flatten().tolist()
