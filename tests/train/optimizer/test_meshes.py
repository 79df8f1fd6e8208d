"""The optimizer on meshes: updates, rounding and norms are those of one process, and states move without loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.save import save_checkpoint
from longtake.parallel.world import World
from longtake.train.optimizer.ema import Ema
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale
from tests.precision import within
from tests.ranks import Facts, on_ranks
from tests.train.optimizer.test_sharded import WAYS, Way, model_of, optimizer_of

SHAPES = (65, 96), (5,), (80, 64), (3, 4)  # rows that do not divide; one rank of four gets none of the last
STEPS = 3


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same parameters, rows dealt over the last axis of the mesh, replicated over the others."""
    sharded = nn.Module()
    for name, p in model.named_parameters():
        sharded.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, placements(mesh))))
    return sharded


def placements(mesh: DeviceMesh) -> list[Any]:
    return [Replicate()] * (mesh.ndim - 1) + [Shard(0)]


def gradients(model: nn.Module, number: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    return {n: torch.randn(p.shape, generator=random).to(p.dtype) for n, p in model.named_parameters()}


def play_steps(model: nn.Module, optimizer: ShardedAdamW, ema: Ema, numbers: range) -> list[float]:
    """Steps with the same whole gradients on every mesh; the norms."""
    norms = []
    for number in numbers:
        for name, grad in gradients(model, number).items():
            p = model.get_parameter(name)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        square = optimizer.grad_square_sum()
        if any(isinstance(p, DTensor) for p in model.parameters()):
            dist.all_reduce(square)
            norms.append(square.sqrt().item())
        optimizer.step(1e-2, torch.tensor(0.125))  # the same to the last bit on every mesh
        ema.update(number + 1)
    return norms


def alone(way: Way, count: int) -> dict[str, Tensor]:
    model = model_of(*SHAPES, dtype=way[1])
    optimizer, ema = without_groups(optimizer_of, model, way), Ema(model, 0.9)
    play_steps(model, optimizer, ema, range(count))
    return everything(model, optimizer, ema)


def without_groups(build: Any, *args: Any) -> Any:
    """As in a process that knows of no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        return build(*args)


def everything(model: nn.Module, optimizer: ShardedAdamW, ema: Ema) -> dict[str, Tensor]:
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()} | optimizer.state() | ema.state()


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor], optimizer: ShardedAdamW) -> list[str]:
    """Where two states are apart at all; of what PyTorch's fused kernel updates, by more than rounding.

    (On a CPU its last elements of a shard, which fill no vector, are rounded otherwise than the rest.)
    """
    assert ours.keys() == theirs.keys()
    fused = tuple(f".{one.name}" for one in optimizer.trained if one.fused)
    found = []
    for name, tensor in ours.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        near = {"rtol": 1e-6, "atol": 1e-9} if any(part in name for part in fused) else {"rtol": 0, "atol": 0}
        if whole.dtype != theirs[name].dtype or not torch.allclose(whole, theirs[name], **near):
            found.append(name)
    return found


def play_ways(world: World, folder: Path) -> Facts:
    """Each way on each mesh; on two ranks what comes out is saved, on four it is read and goes on."""
    meshes = {"shard": init_device_mesh("cpu", (world.size,))}
    if world.size == 4:
        meshes["replicate"] = init_device_mesh("cpu", (2, 2))
    facts: Facts = {}
    for way_name, way in WAYS.items():
        for mesh_name, mesh in meshes.items():
            model = cut(model_of(*SHAPES, dtype=way[1]), mesh)
            optimizer, ema = optimizer_of(model, way, offload=world.size == 4), Ema(model, 0.9)
            norms = play_steps(model, optimizer, ema, range(STEPS))
            whole = [
                torch.cat([g.float().flatten() for g in gradients(model_of(*SHAPES, dtype=way[1]), n).values()]).norm()
                for n in range(STEPS)
            ]
            facts[f"{way_name} {mesh_name}"] = {
                "differing": differing(everything(model, optimizer, ema), alone(way, STEPS), optimizer),
                "norm": max(abs(a - b.item()) / b.item() for a, b in zip(norms, whole, strict=True)),
            }
        saved = folder / way_name.replace(" ", "_")
        if world.size == 2:
            save_checkpoint(saved, 0, STEPS, everything(model, optimizer, ema), {})
            continue
        for mesh_name, mesh in meshes.items():
            model = cut(model_of(*SHAPES, dtype=way[1]), mesh)
            optimizer, ema = optimizer_of(model, way), Ema(model, 0.9)
            load_tensors(next(saved.iterdir()), {name: t.data for name, t in everything(model, optimizer, ema).items()})
            optimizer.set_updates(STEPS)
            play_steps(model, optimizer, ema, range(STEPS, STEPS + 2))
            left = differing(everything(model, optimizer, ema), alone(way, STEPS + 2), optimizer)
            facts[f"{way_name} {mesh_name}"]["after loading"] = left
    return facts


def play_mixed(world: World) -> Facts:
    """The norm of a gradient whose parts lie on several meshes, or on none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = model_of((6, 4), (5, 3), (7,), (9, 2), (4, 4))
    model = nn.Module()
    layouts = [[Replicate(), Shard(0)], [Shard(0), Replicate()], None, [Shard(0), Shard(0)], [Replicate(), Replicate()]]
    inner = mesh["inner"]
    for number, ((name, p), layout) in enumerate(zip(whole.named_parameters(), layouts, strict=True)):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        values = [p.detach().clone(), p.grad.clone()]
        if layout is not None:
            where, how = (inner, layout[1:]) if number == 0 else (mesh, layout)
            values = [distribute_tensor(value, where, how) for value in values]
        own = nn.Parameter(values[0])
        own.grad = values[1]
        model.register_parameter(name, own)
    square = optimizer_of(model, WAYS["fp32"]).grad_square_sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    clipped = max(
        float(((g.full_tensor() if isinstance(g, DTensor) else g) * clip_scale(norm, 1.0) - p.grad).abs().max())
        for g, p in zip((q.grad for q in model.parameters()), whole.parameters(), strict=True)
    )
    return {"norm": abs(float(norm / expected) - 1), "clipped": clipped}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Facts]]:
    saved = tmp_path_factory.mktemp("saved")
    found = {}
    for size, plays in {2: {}, 4: {"mixed": play_mixed}}.items():
        folder = tmp_path_factory.mktemp(f"on {size}")
        found[size] = on_ranks(size, folder, {"ways": partial(play_ways, folder=saved), **plays})
    return found


CASES = [(2, "shard"), (4, "shard"), (4, "replicate")]


@pytest.mark.parametrize(("size", "mesh"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_states_and_averages_are_those_of_one_process_bit_by_bit(
    played: dict[int, list[Facts]], size: int, mesh: str, way: str
) -> None:
    for facts in played[size]:
        assert facts["ways"][f"{way} {mesh}"]["differing"] == []


@pytest.mark.parametrize(("size", "mesh"), CASES)
def test_the_norm_is_that_of_the_whole_gradient(played: dict[int, list[Facts]], size: int, mesh: str) -> None:
    for facts in played[size]:
        assert all(within(facts["ways"][f"{way} {mesh}"]["norm"], 5e-6) for way in WAYS)


@pytest.mark.parametrize("mesh", ["shard", "replicate"])
@pytest.mark.parametrize("way", WAYS)
def test_what_two_ranks_saved_goes_on_at_four_bit_by_bit(played: dict[int, list[Facts]], way: str, mesh: str) -> None:
    for facts in played[4]:
        assert facts["ways"][f"{way} {mesh}"]["after loading"] == []


def test_parts_on_several_meshes_clip_as_the_whole(played: dict[int, list[Facts]]) -> None:
    for facts in played[4]:
        assert within(facts["mixed"]["norm"], 1e-6)
        assert within(facts["mixed"]["clipped"], 1e-6)
