"""Recomputation among sequence and tensor peers, which save and offload outputs as one process does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from longtake.models.mmdit import MMDiT
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.offload import BlockStore
from longtake.parallel.shard import cut_model, initialise_sharded, shard_model
from longtake.parallel.world import World
from tests.models.initialised import initialise
from tests.parallel.blocks import set_blocks
from tests.parallel.one_step import whole
from tests.parallel.plays import gradients_apart
from tests.parallel.tiny import micro_loss, tiny
from tests.precision import within
from tests.ranks import on_ranks

LAYERS = ("linear2", "img_mlp.2")
WAYS = {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}, "ring": {"sequence": 2, "sequence_attention": "ring"}}


def saved_by_peers(world: World) -> dict[str, float]:
    """How far gradients of two peers, all blocks recomputed and some outputs saved, are from one process."""
    found = {}
    for name, parallel in WAYS.items():
        config = tiny(attention="sdpa")
        mesh = Mesh.create(ParallelConfig(**parallel), world)
        with torch.device("meta"):
            model = MMDiT(config)
        cut = cut_model(model, mesh)
        store = BlockStore(1 << 20, least_bytes=1)
        set_blocks(model, LAYERS, cut=cut, store=store)
        shard_model(model, mesh, torch.float32)
        initialise_sharded(model, torch.device("cpu"), 3)
        (micro_loss(model, 0) + micro_loss(model, 2)).backward()
        assert store.room.most_bytes > 0
        alone = MMDiT(config)
        initialise(alone, 3)
        (micro_loss(alone, 0) + micro_loss(alone, 2)).backward()
        found[name] = gradients_apart(model, alone)
    return found


def compiled_by_peers(world: World, way: str, dtype: torch.dtype) -> dict[str, float]:
    """How far gradients of two peers' selective compiled blocks are from those of eager ones that recompute
    nothing, over two lengths; the largest is 1. And the graphs of a kind of block, and their breaks."""
    depths = (1, 0) if way == "tensor" else (0, 1)
    config = tiny(attention="sdpa", depth=depths[0], depth_single_blocks=depths[1])
    mesh, found = Mesh.create(ParallelConfig(**WAYS[way]), world), []
    compiler = BlockCompiler(backend="aot_eager")
    for level in ("none", "selective"):
        with torch.device("meta"):
            model = MMDiT(config)
        cut = cut_model(model, mesh)
        set_blocks(model, level, cut=cut, compiler=None if level == "none" else compiler)
        shard_model(model, mesh, dtype)
        initialise_sharded(model, torch.device("cpu"), 3)
        (micro_loss(model, 0) + micro_loss(model, 4)).backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    farthest = max(float((found[1][name] - grad).abs().max()) for name, grad in found[0].items()) / largest
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return {"farthest": farthest, "graphs": max(compiler.variants.values()), "breaks": breaks}


@pytest.mark.slow
def test_compiled_peers_save_outputs_in_one_graph(tmp_path: Path) -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    cases = [("sequence", bf16), ("ring", fp32), ("tensor", fp32)]
    plays = {f"{way}, {dtype}": partial(compiled_by_peers, way=way, dtype=dtype) for way, dtype in cases}
    for facts in on_ranks(2, tmp_path, plays):
        for name in plays:
            assert within(facts[name]["farthest"], 1e-2 if "bfloat16" in name else 1e-6), name
            assert (facts[name]["graphs"], facts[name]["breaks"]) == (1, 0), name


def test_peers_save_outputs_too(tmp_path: Path) -> None:
    for facts in on_ranks(2, tmp_path, {"saved": saved_by_peers}):
        assert within(max(facts["saved"].values()), 1e-5), facts
