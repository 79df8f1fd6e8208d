"""TTT-Video on every mesh: losses and gradients are those of one process (law 1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longtake.models import TTTVideo
from longtake.models.segments import Segments
from longtake.models.ttt import inner_flops
from longtake.parallel import (
    INPUTS,
    BlockCompiler,
    BlockMode,
    BlockStore,
    Mesh,
    ParallelConfig,
    World,
    choose_kept,
    cut_model,
    initialise_sharded,
    offload_inputs,
    remat_blocks,
    shard_model,
)
from tests.models.golden_ttt_video import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.parallel.one_step import Facts, on_ranks, whole

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}},
    4: {"both": {"tensor": 2, "sequence": 2}, "sequence 4": {"sequence": 4}},
}
SIZES = ((7, 4, 6), (3, 4, 6), (11, 3, 4))  # 3, 1 and 5 segments: shares of 2 and 1, 1 and 0, and of 1, 1, 1 and 0
KINDS: dict[str, dict[str, Any]] = {
    "none": {"mixer": "none"},
    "linear": {"mixer": "ttt_linear"},
    "mlp": {"mixer": "ttt_mlp"},
    "parallel": {"mixer": "ttt_mlp", "directions": "parallel"},
    "large chunk": {"mixer": "large_chunk"},
}


def step(model: TTTVideo, sizes: Sequence[tuple[int, int, int]] = SIZES) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a few micro-batches."""
    losses = []
    for size in sizes:
        x, t, conditions = random_inputs(model.config, size, text_tokens=4)
        loss = (model(x, t, conditions) - x.flip(0)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: whole(p.grad) for name, p in model.named_parameters()}


def differences(parallel: dict[str, Any], kind: str, compiled: bool, world: World) -> Facts:
    """How far losses and gradients are from one process; compiled: with a budget, and how many graphs there are."""
    attention = "sdpa" if compiled else "auto"  # of which something is kept
    config = tiny_config("linear", **{"num_attention_heads": 4, "attention": attention, **KINDS[kind]})
    alone = TTTVideo(config)
    initialise(alone, 3)
    sizes = SIZES[:1] if compiled else SIZES
    losses, gradients = step(alone, sizes)
    mesh = Mesh.create(ParallelConfig(**parallel), world)
    with torch.device("meta"):
        model = TTTVideo(config)
    cut = cut_model(model, mesh)
    compiler = BlockCompiler(backend="aot_eager", mode=BlockMode(static=True))  # as the presets, of one size each
    if compiled:
        kept = remat_blocks(model, (2,), cut, 0.5)["transformer_blocks"]
        assert kept.attention
        assert kept.products
        compiler.compile(model, cut)
    else:
        remat_blocks(model, (1,), cut)
    shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), 3)
    found, own = step(model, sizes)
    largest = max(float(g.abs().max()) for g in gradients.values())
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if compiled else 0
    return {
        "graphs": (compiler.static.get("transformer_blocks", 0), breaks),
        "loss": max(abs(a - b) / b for a, b in zip(found, losses, strict=True)),
        "gradient": max(float((own[name] - g).abs().max()) for name, g in gradients.items()) / largest,
    }


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        (2, ("mlp", "parallel")),
        pytest.param(2, ("none", "linear", "large chunk"), marks=pytest.mark.slow),
        pytest.param(4, ("mlp", "parallel"), marks=pytest.mark.slow),
    ],
)
def test_a_step_on_every_mesh_is_that_of_one_process(size: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    plays = {
        f"{mesh} {kind}": partial(differences, parallel, kind, False)
        for mesh, parallel in MESHES[size].items()
        for kind in kinds
    }
    assert_alike(on_ranks(size, tmp_path, plays))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sequence", "tensor"])
def test_a_step_of_compiled_blocks_that_keep_outputs_is_that_of_one_process(mesh: str, tmp_path: Path) -> None:
    """In one graph, exchanges and all."""
    ranks = on_ranks(2, tmp_path, {mesh: partial(differences, MESHES[2][mesh], "mlp", True)})
    assert [facts[mesh]["graphs"] for facts in ranks] == [[1, 0]] * 2
    assert_alike(ranks)


def assert_alike(ranks: list[Facts]) -> None:
    for facts in ranks:
        for name, far in facts.items():
            assert far["loss"] <= 1e-5, name
            assert far["gradient"] <= 1e-5, name


def test_what_is_kept_of_recomputed_blocks_is_not_computed_again() -> None:
    """Attention and the scans of both directions, and then gradients are the same."""
    config = tiny_config("mlp", attention="sdpa")
    gradients, flops = [], []
    for budget, store in ((None, None), (INPUTS, None), (0.0, None), (0.0, BlockStore(1 << 20, least_bytes=1))):
        model = TTTVideo(config)
        initialise(model, 3)
        if budget is not None:
            remat_blocks(model, (2,), budget=budget, store=store)
        if store is not None:
            offload_inputs(model, (2,), store)
        inputs = random_inputs(config)
        with FlopCounterMode(display=False) as counter:
            model(*inputs).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        flops.append(counter.get_total_flops())
    assert str(choose_kept(model, "transformer_blocks", 0.0)) == "attention"
    assert all(torch.equal(found, gradients[0]) for found in gradients[1:])
    scans = 2 * config.num_layers * inner_flops(config, Segments(5, 6, 2), 3)
    assert flops[1] - flops[2] >= scans > 0
    assert flops[3] == flops[2]
    assert store.room.most_bytes > 2 * 7 * 512  # of each block the input, attention and two scans, each in two parts
