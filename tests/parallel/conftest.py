"""Worlds of 2, 4 and 8 processes, launched when a test asks for what is played in them, once for all that ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from longtake.parallel.world import start_world
from tests.parallel.matrix import TABLES
from tests.parallel.one_step import compare
from tests.parallel.plays import degrees_and_groups, degrees_of_forwards, forwards_of_peers
from tests.parallel.runs_on_peers import continue_all, play_run, save_once
from tests.ranks import Facts, on_ranks
from tests.train.conftest import clips
from tests.train.runs import write_config

__all__ = ["clips"]
Worlds = Callable[[int, str], list[Any]]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    # eps keeps Adam from blowing rounding errors up; fewer samples a micro-batch make it quick
    bucket_config = {"32px": {1: (1.0, 2), 8: (1.0, 3), 16: (1.0, 2)}}
    return write_config(tmp_path_factory.mktemp("run"), clips, eps=1e-4, bucket_config=bucket_config)


@pytest.fixture(scope="session")
def alone(tiny_run: Path) -> Facts:
    """The run of `play_run` in this one process."""
    with start_world("cpu") as world:
        return play_run(tiny_run, "alone", world)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Worlds:
    """What each rank of a world of so many processes found in one play."""

    @cache
    def found(size: int, name: str) -> list[Any]:
        play = {
            **{table: partial(compare, cases.get(size, {})) for table, cases in TABLES.items()},
            "mesh": degrees_and_groups,
            "forwards": forwards_of_peers,
            "degrees": degrees_of_forwards,
            "run": partial(play_run, tiny_run, "peers"),
        }[name]
        return [facts[name] for facts in on_ranks(size, tmp_path_factory.mktemp(f"world{size}"), {name: play})]

    return found


@pytest.fixture(scope="session")
def continued(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> dict[str, Path]:
    """The folders of a run that was saved on one mesh and went on on many, by mesh."""
    saved = on_ranks(2, tmp_path_factory.mktemp("saved"), {"saved": partial(save_once, tiny_run)})[0]["saved"]
    with start_world("cpu") as world:
        folders = continue_all(saved, world)
    for size in (2, 4):
        place = tmp_path_factory.mktemp(f"continued{size}")
        folders |= on_ranks(size, place, {"on": partial(continue_all, saved)})[0]["on"]
    return {name: Path(folder) for name, folder in folders.items()}
