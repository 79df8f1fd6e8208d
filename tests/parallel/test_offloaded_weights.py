"""Weights that come for a phase of work and leave again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from longtake.parallel.offloaded_weights import OffloadedWeights
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World, start_world

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).eval()
    model[0].tied = model[0].weight  # one weight under two names
    return model


def sharded(zero: int) -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)


def held(model: nn.Module) -> int:
    """Bytes under the weights that are there."""
    storages = {
        local_tensor(t).untyped_storage()._cdata: local_tensor(t).untyped_storage()
        for t in (*model.parameters(), *model.buffers())
    }
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("kind", ["plain", "zero 3", "zero 2"])
@torch.no_grad()
def test_weights_leave_and_come_back_as_they_were(world: World, kind: str) -> None:
    model = plain() if kind == "plain" else sharded(int(kind[-1]))
    dtype = torch.float32 if kind == "plain" else torch.bfloat16
    x = torch.rand(4, 8, dtype=dtype)
    model[1].to(dtype)
    whole, wanted = held(model), model(x)
    weights = OffloadedWeights(model, CPU)
    for _ in range(2):
        assert held(model) == 0
        weights.load()
        weights.load()
        assert weights.on_device
        assert held(model) == whole == weights.num_bytes
        assert torch.equal(model(x), wanted)
        weights.offload()
        weights.offload()


def test_what_is_elsewhere_stays(world: World) -> None:
    model = plain()
    weights = OffloadedWeights(model, torch.device("cuda"))
    assert weights.num_bytes == 0
    assert held(model) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_gpu_has_its_memory_back() -> None:
    device = torch.device("cuda")
    x = torch.rand(64, 2048, device=device)
    x @ x.T  # cuBLAS takes a workspace of up to 32 MiB at its first product, and keeps it
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
    wanted = model(x)
    weights = OffloadedWeights(model, device)
    assert weights.num_bytes > 2**26
    assert torch.cuda.memory_allocated() - before <= 4 * x.nbytes + 2**20
    scratch = torch.full((2**26,), 7.0, device=device)  # takes the memory that was freed
    weights.load()
    assert torch.equal(model(x), wanted)
    weights.offload()
    assert scratch.min() == 7
