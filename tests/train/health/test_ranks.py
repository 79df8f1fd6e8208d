"""What each rank says of its own time: a slow one is seen as such though all ranks make their steps together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.models.mmdit import SingleBlock
from longtake.parallel.world import start_world
from longtake.track.progress import make_console
from longtake.train.health.ranks import RankTimes
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.forks import on_processes
from tests.train.runs import free_port, metrics, write_config

SLOW, FACTOR = 1, 3.0


def _play(rank: int, port: int, run: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    forward, clock = SingleBlock.forward, SimpleNamespace(now=0.0)

    def slowed(self: Any, *args: Any) -> Any:
        clock.now += FACTOR if rank == SLOW else 1.0
        return forward(self, *args)

    with (
        start_world("cpu", timeout_seconds=120) as world,
        pytest.MonkeyPatch.context() as patch,
        run.with_suffix(".txt").open("w") as said,
    ):
        patch.setattr(SingleBlock, "forward", slowed)
        patch.setattr("longtake.train.health.ranks.time", SimpleNamespace(perf_counter=lambda: clock.now))
        train(read_run(str(run)).value, world, str(run), make_console(said))


def test_the_time_of_a_slow_rank_is_its_own(tmp_path: Path, clips: Path) -> None:
    run = write_config(tmp_path, clips, max_steps=8, log_every=4, slots_per_step=4, exp_name="two")
    on_processes(_play, 2, free_port(), run)
    lines = metrics(tmp_path / "outputs" / "two")
    assert [line["step"] for line in lines if "ranks" in line] == [4, 8]
    for line in lines:
        if (ranks := line.get("ranks")) is not None:
            quick, slow = ranks["seconds"]
            assert slow > 2 * quick > 0  # its forwards are not the same ones
            assert len(ranks["wait"]) == 2
            assert ranks["tflop"] > 0


@pytest.mark.gpu
def test_on_a_gpu_the_time_is_that_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    block, x = torch.nn.Linear(4096, 4096, device="cuda"), torch.randn(8192, 4096, device="cuda")
    denoiser = torch.nn.Module()
    denoiser.blocks, denoiser.double = ("double",), torch.nn.ModuleList([block])
    slot = SimpleNamespace(bucket=SimpleNamespace(shape=(1, 1, 1), batch_size=1))
    system = SimpleNamespace(denoiser=denoiser, device=x.device, flops=lambda shape: 2 * 8192 * 4096**2)
    stream = SimpleNamespace(world=SimpleNamespace(size=2), peers=SimpleNamespace(count=lambda bucket: 1))
    step = SimpleNamespace(turns=[SimpleNamespace(slot=slot)], slots=[slot, slot], wait_seconds=0.5)
    monkeypatch.setattr("longtake.train.health.ranks.all_gather_single", lambda out, own: out.copy_(own.repeat(2)))
    times = RankTimes(system, stream, every=8)
    taken = []
    for number in range(1, 9):
        torch.cuda.synchronize()  # as the loop does not
        begun = time.perf_counter()
        out = block(x)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
        out.sum().backward()
        with torch.no_grad():
            block(x)  # of a validation: not counted
        gathered = times.step(step, number)
        assert (gathered is None) == (number < 8)
    seconds, wait, tflop = gathered[1].tolist()
    assert 0 < seconds <= max(taken)  # the kernels of a step ran within the time that it took
    assert (wait, tflop) == (0.5, pytest.approx(0.275, rel=0.01))
