"""Worlds of several processes on this machine, and what each of their ranks finds."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from longtake.parallel.world import World, start_world
from tests.forks import on_processes
from tests.train.runs import free_port

Facts = dict[str, Any]
Play = Callable[[World], Facts]


def on_ranks(size: int, folder: Path, plays: Mapping[str, Play]) -> list[Facts]:
    """What each play finds, by its name, on each rank of a world of `size` processes."""
    on_processes(_play, size, size, free_port(), folder, plays)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _play(rank: int, size: int, port: int, folder: Path, plays: Mapping[str, Play]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    with start_world("cpu", timeout_seconds=240) as world:
        facts = {name: play(world) for name, play in plays.items()}
        (folder / f"{rank}.json").write_text(json.dumps(facts))
