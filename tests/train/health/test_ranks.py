"""What each rank says of its own time: a slow one is seen as such though all ranks make their steps together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.models.mmdit import SingleBlock
from longtake.parallel import start_world
from longtake.track import make_console
from longtake.train import read_run, train
from tests.forks import on_processes
from tests.train.runs import free_port, metrics, write_config

SLOW, SLEEP_SECONDS = 1, 0.05  # in one block of two


def _play(rank: int, port: int, run: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    forward = SingleBlock.forward

    def slowed(self: Any, *args: Any) -> Any:
        if rank == SLOW:
            time.sleep(SLEEP_SECONDS)
        return forward(self, *args)

    with (
        start_world("cpu", timeout_seconds=120) as world,
        pytest.MonkeyPatch.context() as patch,
        run.with_suffix(".txt").open("w") as said,
    ):
        patch.setattr(SingleBlock, "forward", slowed)
        train(read_run(str(run)).value, world, str(run), make_console(said))


def test_the_time_of_a_slow_rank_is_its_own(tmp_path: Path, clips: Path) -> None:
    run = write_config(tmp_path, clips, max_steps=8, log_every=4, slots_per_step=4, exp_name="two")
    on_processes(_play, 2, free_port(), run)
    lines = metrics(tmp_path / "outputs" / "two")
    assert [line["step"] for line in lines if "ranks" in line] == [4, 8]
    for line in lines:
        if (ranks := line.get("ranks")) is not None:
            quick, slow = ranks["seconds"]
            assert slow - quick > SLEEP_SECONDS
            assert quick < 0.5 * line["seconds"]  # which waits for the other in each step
            assert len(ranks["wait"]) == 2
            assert ranks["tflop"] > 0
