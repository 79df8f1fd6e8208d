"""Joining processes, acting together, failing together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from longtake.contracts import UserError
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import initialise_sharded, local_tensor, own_part, shard_model
from longtake.parallel.world import _LAST_HOST_SECONDS, World, allocator_settings, start_world
from tests.forks import on_processes
from tests.train.runs import free_port

RANKS = 2


class Uneven(nn.Module):
    """Three rows on two ranks; initial values that say where they belong."""

    blocks = ("layers",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def initial_value(self, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.arange(count, dtype=torch.float32).reshape(shape) + seed + len(name)


def _fail(error: Exception) -> None:
    raise error


def _checks(world: World) -> None:
    """What two processes find, each by itself."""
    assert (world.rank, world.size) == (dist.get_rank(), RANKS)
    assert world.broadcast({"rank": world.rank}) == {"rank": 0}
    assert world.gather(world.rank * 10) == [0, 10]
    assert world.on_main(lambda: world.rank) == 0
    assert world.on_all(lambda: world.rank) == world.rank
    with pytest.raises(UserError, match="only here"):
        world.on_main(lambda: _fail(UserError("only here")))
    with pytest.raises(FileNotFoundError) as missing:
        world.on_main(lambda: open("/nothing/there"))  # noqa: SIM115
    assert missing.value.filename == "/nothing/there"
    with pytest.raises(UserError, match="rank 1 says"):
        world.on_all(lambda: _fail(UserError("rank 1 says")) if world.rank == 1 else None)
    with pytest.raises(KeyError if world.is_main else RuntimeError, match="'x'"):  # its own keeps its traceback
        world.on_all(lambda: {}["x"])
    with pytest.raises(UserError, match=r"parallel\.replicate = 3: 2 processes .* choose one of 1, 2"):
        Mesh.create(ParallelConfig(replicate=3), world)
    with pytest.raises(UserError, match=r"1 x 1: makes 1 ranks but 2 are running; choose shard = 2"):
        Mesh.create(ParallelConfig(shard=1), world)
    for config in (ParallelConfig(), ParallelConfig(replicate=2), ParallelConfig(shard=2, zero=2)):
        mesh = Mesh.create(config, world)
        assert (mesh.data_ranks, mesh.data_rank) == (2, world.rank)
        for smallest_unit in (0, 4_000_000):  # each layer gathered by itself, all of them together
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", smallest_unit)
                _check_model(mesh)


def _check_model(mesh: Mesh) -> None:
    """Values are those of the whole model on any mesh, before and after a forward and backward pass."""
    with torch.device("meta"):
        model = Uneven()
    shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), seed=5)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = model.initial_value(name, tuple(parameter.shape), 5)
            assert torch.equal(parameter.full_tensor(), whole)
            assert torch.equal(local_tensor(parameter), own_part(whole, parameter))
        model(torch.ones(2, 4)).sum().backward()


def _run(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with start_world("cpu", timeout_seconds=120) as world:
        _checks(world)
    assert not dist.is_initialized()
    (folder / f"{rank}.done").touch()


def test_two_processes_act_and_fail_together(tmp_path: Path) -> None:
    on_processes(_run, RANKS, free_port(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0.done", "1.done"}


def _leave(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(RANKS)}
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.parallel.world.time.sleep", slept.append)
        with start_world("cpu", timeout_seconds=120):
            slept.clear()  # of the wait for the other
    (folder / f"{rank}.json").write_text(json.dumps(slept))


def test_the_host_of_the_store_is_left_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_processes(_leave, RANKS, free_port(), tmp_path)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[_LAST_HOST_SECONDS], []]
    slept: list[float] = []
    monkeypatch.setattr("longtake.parallel.world.time.sleep", slept.append)
    with start_world("cpu"):
        pass
    assert not slept, "one host has nobody to wait for"


def test_one_process_is_a_world_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of torchrun's variables, as clusters set them for their own use, do not make it wait for others."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with start_world("cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.broadcast("x") == "x"
        assert world.gather("x") == ["x"]
        assert world.on_main(lambda: 1) == world.on_all(lambda: 1) == 1
        world.barrier()
        with pytest.raises(KeyError):
            world.on_all(lambda: {}["x"])
        _check_model(Mesh.create(ParallelConfig(), world))
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_connects_at_once_only_where_there_are_peers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    launched["TORCHELASTIC_RUN_ID"] = "x"  # whose agent hosts the store
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    options: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: options.update(given, backend=backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with start_world("cuda") as world:
        assert world.device == torch.device("cuda", 0)
    assert options["backend"] == "nccl"
    assert options.get("device_id") == (world.device if size > 1 else None)


def test_a_world_is_left_after_an_error() -> None:
    with pytest.raises(UserError), start_world("cpu"):
        raise UserError("no")
    assert not dist.is_initialized()


def test_segments_grow_unless_the_user_or_nccl_has_a_say() -> None:
    assert allocator_settings({"NCCL_LOCAL_REGISTER": "0"}) == "expandable_segments:True"
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}) is None
    for name in ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        assert allocator_settings({name: "1"}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(UserError, match="PyTorch finds no CUDA device"), start_world("cuda"):
        pass
    with start_world("auto") as world:
        assert world.device.type == "cpu"
