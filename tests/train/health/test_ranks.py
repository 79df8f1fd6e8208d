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
from longtake.parallel import start_world
from longtake.track import make_console
from longtake.train import read_run, train
from longtake.train.health import RankTimes
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
    for number in range(1, 9):
        torch.cuda.synchronize()  # as the loop does not
        begun = time.perf_counter()
        out = block(x)
        torch.cuda.synchronize()
        taken = time.perf_counter() - begun
        out.sum().backward()
        with torch.no_grad():
            block(x)  # of a validation: not counted
        gathered = times.step(step, number)
        assert (gathered is None) == (number < 8)
    seconds, wait, tflop = gathered[1].tolist()
    assert seconds == pytest.approx(taken, rel=0.5)
    assert (wait, tflop) == (0.5, pytest.approx(0.275, rel=0.01))
