"""CogVideoX on every mesh: losses and gradients are those of one process (law 1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.models import CogVideoX, LoraConfig, adapt
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
from longtake.weights.cogvideox import FORMAT
from tests.models.golden_cogvideox import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.parallel.one_step import Facts, on_ranks, stir, whole

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}},
    4: {"both": {"tensor": 2, "sequence": 2}, "ring": {"sequence": 4}},
}
SIZES = ((3, 8, 12), (1, 3, 4), (2, 2, 2))  # 72, 4 or 2 and 2 or 1 video tokens beside 5 of text
VARIANTS = ("2b", "5b_i2v", "1.5_i2v", "fun_inp_5b")


def step(
    model: CogVideoX, sizes: Sequence[tuple[int, int, int]] = SIZES
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a few micro-batches."""
    losses = []
    for size in sizes:
        x, t, conditions = random_inputs(model.config, size)
        loss = (model(x, t, conditions) - x.flip(0)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def with_adapters(model: CogVideoX, lora: bool) -> CogVideoX:
    if lora:
        section = LoraConfig(rank=4)
        adapt(model, adapter_sizes(FORMAT, model, section, {}), section.base, torch.float32)
    return model


def differences(parallel: dict[str, Any], variant: str, lora: bool, compiled: bool, world: World) -> Facts:
    """How far losses and gradients are from one process; compiled: with a budget, and how many graphs there are."""
    config = tiny_config(variant, **({"attention": "sdpa"} if compiled else {}))  # of which something is kept
    sizes = SIZES[:1] if compiled else SIZES
    alone = with_adapters(CogVideoX(config), lora)
    initialise(alone, 3)
    stir(alone)
    losses, gradients = step(alone, sizes)
    mesh = Mesh.create(ParallelConfig(**parallel), world)
    with torch.device("meta"):
        model = CogVideoX(config)
    with_adapters(model, lora)
    cut = cut_model(model, mesh)
    compiler = BlockCompiler(backend="aot_eager", mode=BlockMode(static=True))  # a graph for the one size there is
    if compiled:
        kept = remat_blocks(model, (len(model.transformer_blocks),), cut, 0.5)["transformer_blocks"]
        assert kept.attention
        assert kept.products
        compiler.compile(model, cut)
    else:
        remat_blocks(model, (1,), cut)
    shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), 3)
    stir(model)
    found, own = step(model, sizes)
    largest = max(float(g.abs().max()) for g in gradients.values())
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if compiled else 0
    return {
        "graphs": (compiler.static.get("transformer_blocks", 0), breaks),
        "loss": max(abs(a - b) / b for a, b in zip(found, losses, strict=True)),
        "gradient": max(float((own[name] - g).abs().max()) for name, g in gradients.items()) / largest,
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_on_every_mesh_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    plays = {
        f"{mesh} {variant}": partial(differences, parallel, variant, False, False)
        for mesh, parallel in MESHES[size].items()
        for variant in VARIANTS
    }
    plays |= {f"{mesh} lora": partial(differences, of, "5b", True, False) for mesh, of in MESHES[size].items()}
    assert_alike(on_ranks(size, tmp_path, plays))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sequence", "tensor"])
def test_a_step_of_compiled_blocks_that_keep_outputs_is_that_of_one_process(mesh: str, tmp_path: Path) -> None:
    """In one graph, exchanges and all."""
    ranks = on_ranks(2, tmp_path, {mesh: partial(differences, MESHES[2][mesh], "fun_inp_5b", False, True)})
    assert [facts[mesh]["graphs"] for facts in ranks] == [[1, 0]] * 2
    assert_alike(ranks)


def assert_alike(ranks: list[Facts]) -> None:
    for facts in ranks:
        for name, far in facts.items():
            assert far["loss"] <= 1e-5, name
            assert far["gradient"] <= 1e-5, name
