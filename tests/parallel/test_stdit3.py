"""STDiT3 on every mesh: losses and gradients are those of one process (law 1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.models import LoraConfig, STDiT3, adapt
from longtake.parallel import (
    BlockCompiler,
    BlockMode,
    Mesh,
    ParallelConfig,
    World,
    cut_model,
    initialise_sharded,
    remat_blocks,
    shard_model,
)
from longtake.system.lora import adapter_sizes
from longtake.weights.stdit3 import FORMAT
from tests.models.golden_stdit3 import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.parallel.one_step import Facts, on_ranks, stir, whole

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}},
    4: {"both": {"tensor": 2, "sequence": 2}, "sequence": {"sequence": 4}, "tensor": {"tensor": 4}},
}
SIZES = ((3, 4, 6), (1, 3, 5), (5, 2, 2))  # frames that do not divide, a still, a place fewer than peers
UNEVEN = ((5, 6, 6),)  # neither frames nor places divide by two


def step(model: STDiT3, sizes: Sequence[tuple[int, int, int]] = SIZES) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a few micro-batches, of the first a frame is known."""
    losses = []
    for i, size in enumerate(sizes):
        x, t, conditions = random_inputs(model.config, size, known=i == 0)
        loss = (model(x, t, conditions) - x.flip(0)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def with_adapters(model: STDiT3, lora: bool) -> STDiT3:
    if lora:
        section = LoraConfig(rank=3)
        adapt(model, adapter_sizes(FORMAT, model, section, {}), section.base, torch.float32)
    return model


@torch.no_grad()
def liven(model: STDiT3) -> None:
    """Temporal blocks that are no identities."""
    for name, p in model.named_parameters():
        if p.requires_grad and name.startswith("temporal_blocks."):
            p.add_(0.05)


def differences(parallel: dict[str, Any], lora: bool, compiled: bool, world: World) -> Facts:
    """How far losses and gradients are from one process; compiled: with a budget, and how many graphs there are."""
    config = tiny_config(**({"attention": "sdpa", "depth": 1} if compiled else {}))  # of which something is kept
    alone = with_adapters(STDiT3(config), lora)
    initialise(alone, 3)
    stir(alone)
    liven(alone)
    sizes = UNEVEN if compiled else SIZES
    losses, gradients = step(alone, sizes)
    mesh = Mesh.create(ParallelConfig(**parallel), world)
    with torch.device("meta"):
        model = STDiT3(config)
    with_adapters(model, lora)
    cut = cut_model(model, mesh)
    compiler = BlockCompiler(backend="aot_eager", mode=BlockMode(static=True))  # open sizes take 60 s more
    if compiled:
        kept = remat_blocks(model, (1, 1), cut, 0.5)
        assert all(one.attention and one.products for one in kept.values())
        compiler.compile(model, cut)
    else:
        remat_blocks(model, (1, 1), cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0)
        shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), 3)
    stir(model)
    liven(model)
    found, own = step(model, sizes)
    largest = max(float(g.abs().max()) for g in gradients.values())
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if compiled else 0
    return {
        "graphs": (*compiler.static.values(), breaks),
        "loss": max(abs(a - b) / b for a, b in zip(found, losses, strict=True)),
        "gradient": max(float((own[name] - g).abs().max()) for name, g in gradients.items()) / largest,
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_on_every_mesh_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    plays = {
        f"{mesh} {lora}": partial(differences, parallel, lora, False)
        for mesh, parallel in MESHES[size].items()
        for lora in (False, True)
    }
    assert_alike(on_ranks(size, tmp_path, plays))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sequence", "tensor"])
def test_a_step_of_compiled_blocks_that_keep_outputs_is_that_of_one_process(mesh: str, tmp_path: Path) -> None:
    """In one graph of each kind of block, exchanges and all."""
    ranks = on_ranks(2, tmp_path, {mesh: partial(differences, MESHES[2][mesh], False, True)})
    assert [facts[mesh]["graphs"] for facts in ranks] == [[1, 1, 0]] * 2
    assert_alike(ranks)


def assert_alike(ranks: list[Facts]) -> None:
    for facts in ranks:
        for name, far in facts.items():
            assert far["loss"] <= 1e-5, name
            assert far["gradient"] <= 1e-5, name
