"""Frozen modules over two ranks, and on the host between uses: the same results, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.parallel.frozen import HostWeights, fill_frozen, frozen_bytes, frozen_mesh, shard_frozen
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World
from tests.ranks import Facts, on_ranks

WIDTH = 24


class Stack(nn.Module):
    """Three blocks between an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape, generator=generator) for name, value in Stack().state_dict().items()}


def filled(device: str = "cpu") -> Stack:
    with torch.device("meta"):
        stack = Stack()
    fill_frozen(stack, weights(), torch.device(device))
    return stack


IDS = torch.arange(10).reshape(2, 5)


def over_ranks(world: World) -> Facts:
    """What a rank holds and computes of a stack that is cut over all ranks."""
    with torch.device("meta"):
        stack = Stack()
    shard_frozen(stack, list(stack.blocks), frozen_mesh(world))
    fill_frozen(stack, weights(), world.device)
    ids = IDS + world.rank % 2  # each rank its own input, as in training
    with torch.no_grad():
        outputs = [stack(ids) for _ in range(2)]
    held = sum(local_tensor(parameter).nbytes for parameter in stack.parameters())
    return {"held": held, "outputs": [output.tolist() for output in outputs], "grad": outputs[0].requires_grad}


def meshes(world: World) -> Facts:
    """How many ranks hold a module together, where a node is the world and where it is one rank."""
    alone = World(world.rank, world.size, 0, world.device, local_size=1)
    return {"whole": frozen_mesh(world).size(), "node": frozen_mesh(alone).size()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return on_ranks(2, tmp_path_factory.mktemp("frozen"), {"over": over_ranks, "mesh": meshes})


@torch.no_grad()
def test_a_cut_module_gives_what_the_whole_one_gives(ranks: list[Facts]) -> None:
    whole = filled()
    for rank, facts in enumerate(ranks):
        for output in facts["over"]["outputs"]:
            assert torch.equal(torch.tensor(output), whole(IDS + rank))
        assert not facts["over"]["grad"]


def test_each_of_two_ranks_holds_half(ranks: list[Facts]) -> None:
    whole = sum(value.nbytes for value in weights().values())
    held = [facts["over"]["held"] for facts in ranks]
    assert sum(held) == whole
    assert max(held) <= 0.55 * whole


@torch.no_grad()
def test_weights_that_visit_give_what_resident_ones_give() -> None:
    resident, visiting = filled(), filled()
    HostWeights(visiting, list(visiting.blocks), torch.device("cpu"))
    for ids in (IDS, IDS + 1):
        assert torch.equal(visiting(ids), resident(ids))


@torch.no_grad()
def test_a_forward_that_fails_leaves_the_next_one_right() -> None:
    resident, visiting = filled(), filled()
    HostWeights(visiting, list(visiting.blocks), torch.device("cpu"))
    handle = visiting.blocks[1].register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="stop"):
        visiting(IDS)
    handle.remove()
    assert torch.equal(visiting(IDS), resident(IDS))


def _fail(*_: Any) -> None:
    raise RuntimeError("stop")


def test_only_two_units_are_on_the_device_at_a_time() -> None:
    visiting = filled()
    host = HostWeights(visiting, list(visiting.blocks), torch.device("cpu"))
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    aligned = sum(-(-size // 256) * 256 for size in (4 * WIDTH * WIDTH, 4 * WIDTH))
    held = []
    visiting.blocks[1].register_forward_hook(lambda *_: held.append(sum(buffer.nbytes for buffer in host._buffers)))
    assert not host._buffers
    with torch.no_grad():
        visiting(IDS)
    assert held == [2 * aligned]
    assert not host._buffers
    rest = 4 * (11 * WIDTH + 2 * WIDTH)
    assert frozen_bytes([unit] * 3, rest, "offloaded", 1) == 2 * unit + rest


def test_bytes_of_a_placement_are_counted() -> None:
    units, rest = [100, 100, 100], 40
    assert frozen_bytes(units, rest, "resident", 8) == 340
    assert frozen_bytes(units, rest, "sharded", 1) == 340
    assert frozen_bytes(units, rest, "sharded", 2) == 150 + 20 + 200  # shares, and two blocks gathered
    assert frozen_bytes(units, rest, "offloaded", 8) == 240


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_weights_visit_a_gpu_without_a_mistake_and_leave_it() -> None:
    device = torch.device("cuda")
    resident, visiting = filled("cuda"), filled()
    host = HostWeights(visiting, list(visiting.blocks), device)
    outputs = [visiting((IDS + i % 2).to(device)) for i in range(50)]
    for i, output in enumerate(outputs):
        assert torch.equal(output, resident((IDS + i % 2).to(device)))
    assert not host._buffers
    assert {parameter.device.type for parameter in visiting.blocks.parameters()} == {"cpu"}


def test_a_node_is_what_holds_a_module_together(ranks: list[Facts]) -> None:
    assert [facts["mesh"] for facts in ranks] == [{"whole": 2, "node": 1}] * 2
