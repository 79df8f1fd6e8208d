"""Recomputation among sequence and tensor peers, which keep outputs and let them wait in host memory as one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from longtake.models import MMDiT, build_denoiser, example_conditions
from longtake.parallel import (
    BlockCompiler,
    BlockStore,
    Mesh,
    ParallelConfig,
    Split,
    World,
    cut_model,
    initialise_sharded,
    offload_inputs,
    remat_blocks,
    shard_model,
)
from tests.models.initialised import initialise
from tests.parallel.one_step import micro_loss, on_ranks, tiny, whole
from tests.parallel.plays import farthest
from tests.plan.test_blocks import FAMILIES

WAYS = {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}, "ring": {"sequence": 2, "sequence_attention": "ring"}}

SEGMENTS = {"ttt_video": {"segment_frames": 4}}  # three of them


def kept_by_peers(world: World) -> dict[str, float]:
    """How far gradients of two peers, all blocks recomputed and some outputs kept, are from one process."""
    found = {}
    for name, parallel in WAYS.items():
        config = tiny(attention="sdpa")
        mesh = Mesh.create(ParallelConfig(**parallel), world)
        with torch.device("meta"):
            model = MMDiT(config)
        cut = cut_model(model, mesh)
        store = BlockStore(1 << 20, least_bytes=1)
        kept = remat_blocks(model, (2, 2), cut, Split(1.0, 0.5, (0, 1)), store)
        assert all(kept.values())
        offload_inputs(model, (2, 2), store)
        shard_model(model, mesh, torch.float32)
        initialise_sharded(model, torch.device("cpu"), 3)
        (micro_loss(model, config, 0) + micro_loss(model, config, 2)).backward()
        assert store.room.most_bytes > 0
        alone = MMDiT(config)
        initialise(alone, 3)
        (micro_loss(alone, config, 0) + micro_loss(alone, config, 2)).backward()
        found[name] = farthest(model, alone)
    return found


def kept_by_families(world: World) -> dict[str, float]:
    """The same of every family, with what attention gives alone and with a budget, in turns of degree and family."""
    found = {}
    cases = [(family, way, budget) for family in FAMILIES for way, budget in (("sequence", 0.5), ("tensor", 0.0))]
    for family, way, budget in cases:
        config = FAMILIES[family].model_copy(update={"attention": "sdpa", **SEGMENTS.get(family, {})})
        latent = (config.latent_channels, 13, 4, 4)
        x = torch.randn(2, *latent, generator=torch.Generator().manual_seed(1))
        conditions = example_conditions(config, latent, 6, 2)
        if "size" in conditions:
            conditions["size"].fill_(64.0)
        alone = build_denoiser(config)
        initialise(alone, 3)
        mesh = Mesh.create(ParallelConfig(**WAYS[way]), world)
        with torch.device("meta"):
            model = build_denoiser(config)
        cut = cut_model(model, mesh)
        kept = remat_blocks(model, [len(model.get_submodule(name)) for name in model.blocks], cut, budget)
        assert all(one.attention and (one.products or not budget) for one in kept.values())
        shard_model(model, mesh, torch.float32)
        initialise_sharded(model, torch.device("cpu"), 3)
        for one in (alone, model):
            (one(x, torch.full((2,), 0.5), conditions) - x.flip(0)).square().mean().backward()
        found[f"{family}, {way}"] = farthest(model, alone)
    return found


def compiled_by_peers(world: World, way: str, dtype: torch.dtype) -> dict[str, float]:
    """How far gradients of two peers' compiled blocks with a budget are from those of eager ones that recompute
    nothing, over two lengths; the largest is 1. And the graphs of a kind of block, and their breaks."""
    depths = (1, 0) if way == "tensor" else (0, 1)
    config = tiny(attention="sdpa", depth=depths[0], depth_single_blocks=depths[1])
    mesh, found = Mesh.create(ParallelConfig(**WAYS[way]), world), []
    compiler = BlockCompiler(backend="aot_eager")
    for budget in (None, 0.5):
        with torch.device("meta"):
            model = MMDiT(config)
        cut = cut_model(model, mesh)
        if budget is not None:
            kept = remat_blocks(model, depths, cut, budget)
            assert any(one.attention and one.products for one in kept.values())
            compiler.compile(model, cut)
        shard_model(model, mesh, dtype)
        initialise_sharded(model, torch.device("cpu"), 3)
        (micro_loss(model, config, 0) + micro_loss(model, config, 4)).backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    farthest = max(float((found[1][name] - grad).abs().max()) for name, grad in found[0].items()) / largest
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return {"farthest": farthest, "graphs": max(compiler.variants.values()), "breaks": breaks}


@pytest.mark.slow
def test_compiled_peers_keep_outputs_in_one_graph(tmp_path: Path) -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    cases = [("sequence", bf16), ("ring", fp32), ("tensor", fp32)]
    plays = {f"{way}, {dtype}": partial(compiled_by_peers, way=way, dtype=dtype) for way, dtype in cases}
    for facts in on_ranks(2, tmp_path, plays):
        for name in plays:
            assert facts[name]["farthest"] <= (1e-2 if "bfloat16" in name else 1e-6), name
            assert (facts[name]["graphs"], facts[name]["breaks"]) == (1, 0), name


def test_peers_keep_outputs_too(tmp_path: Path) -> None:
    for facts in on_ranks(2, tmp_path, {"kept": kept_by_peers, "of families": kept_by_families}):
        assert max(facts["kept"].values()) <= 1e-5
        assert max(facts["of families"].values()) <= 1e-5, facts
