"""One optimizer step of a tiny MMDiT on any mesh, and in one process, to be compared (law 1)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtake.models import LoraConfig, MMDiT, MMDiTConfig, adapt
from longtake.models.initial import linear_uniform
from longtake.parallel import (
    INPUTS,
    BlockCompiler,
    BlockMode,
    Mesh,
    ParallelConfig,
    World,
    cut_model,
    initialise_sharded,
    remat_and_compile,
    remat_blocks,
    shard_model,
    start_world,
)
from longtake.system.float8 import use_float8
from longtake.system.lora import adapter_sizes, fill, start_adapters
from longtake.train.optimizer import ShardedAdamW, clip_scale
from longtake.weights.mmdit import FORMAT
from tests.forks import on_processes
from tests.models.golden import random_inputs
from tests.models.initialised import initialise
from tests.train.optimizer.test_schedule import run_config
from tests.train.runs import free_port

# (frames, height, width) of latents and text tokens of micro-batches: 18, 12, 5, 1 and 12 video tokens.
MICRO = (((2, 6, 6), 5), ((3, 4, 4), 2), ((1, 10, 2), 1), ((1, 2, 2), 4), ((2, 4, 6), 7))
LR, EPS, CLIP = 1e-2, 1e-2, 0.05


@dataclass(frozen=True)
class Case:
    """How one step is made."""

    parallel: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    micro: tuple[int, ...] = (0, 1, 2, 3)  # micro-batches of the step
    remat: tuple[int, int] | None = None
    budget: float = INPUTS  # of what recomputed blocks keep; with more than inputs all are compiled, if any
    frozen: tuple[str, ...] = ()  # parameters whose names hold one of these are not trained
    by_blocks: bool = True  # each block gathered by itself
    compiled: str | None = None  # compiler backend for one double and one single block
    lora: Mapping[str, Any] | None = None  # the section of that name: adapters train in place of the model
    dtype: torch.dtype = torch.float32  # of compute
    float8: bool = False  # products of blocks


@dataclass(frozen=True)
class Step:
    """What came of a step: everything whole."""

    losses: list[float]
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def tiny(**changes: Any) -> MMDiTConfig:
    sizes = {
        "in_channels": 16,
        "vec_in_dim": 8,
        "context_in_dim": 12,
        "hidden_size": 32,
        "num_heads": 4,
        "axes_dim": (2, 2, 4),
        "depth": 2,
        "depth_single_blocks": 2,
        "cond_embed": True,
    }
    return MMDiTConfig(**{**sizes, **changes})


def freeze(model: nn.Module, parts: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def choose(model: nn.Module, case: Case) -> None:
    """What of the model trains: all but the frozen, or adapters."""
    if case.lora is None:
        freeze(model, case.frozen)
    else:
        lora = LoraConfig(**case.lora)
        adapt(model, adapter_sizes(FORMAT, model, lora, {}), lora.base, torch.float32)


def stir(model: nn.Module) -> None:
    """Gives adapters values as in the midst of training: at first B is zero, and with it the gradient of A."""
    start_adapters(model, {})
    values = {name: p for name, p in model.named_parameters() if name.endswith(("lora_b", "magnitude"))}
    fill(model, {name: linear_uniform(name, p.shape, p.shape[-1], 7) + (p.ndim == 1) for name, p in values.items()})


def micro_loss(model: nn.Module, config: MMDiTConfig, index: int) -> Tensor:
    size, text_tokens = MICRO[index]
    x, t, conditions = random_inputs(config, size, batch=2, text_tokens=text_tokens)
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(index))
    return (model(x, t, conditions) - target).square().mean()


def step_alone(case: Case) -> Step:
    """The step in one process, without any parallel code."""
    config = tiny(**case.model)
    model = MMDiT(config)
    choose(model, case)
    if case.float8:
        use_float8(model, torch.device("cpu"))
    initialise(model, 3)
    stir(model)
    losses = [micro_loss(model, config, i) for i in case.micro]
    (sum(losses) / len(losses)).backward()
    optimizer = ShardedAdamW(model, run_config(lr=LR, eps=EPS))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    optimizer.step(LR, clip_scale(norm, CLIP))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Step([loss.item() for loss in losses], float(norm), gradients, weights)


def step_on(case: Case, world: World) -> Step:
    """The step on a mesh, as the training loop makes it. Collective."""
    torch.compiler.reset()  # a run compiles one model; after others sizes are left open, which takes minutes
    config = tiny(**case.model)
    mesh = Mesh.create(ParallelConfig(**case.parallel), world)
    with torch.device("meta"):
        model = MMDiT(config)
    choose(model, case)
    if case.float8:
        use_float8(model, torch.device("cpu"))
    cut = cut_model(model, mesh)
    if case.budget != INPUTS:
        compiler = None if case.compiled is None else BlockCompiler(backend=case.compiled)
        remat_and_compile(model, case.remat, cut, BlockMode(budget=case.budget), compiler)
    elif case.compiled is not None:
        for block in (model.double_blocks[1], model.single_blocks[0]):
            block.forward = torch.compile(block.forward, backend=case.compiled)
    if case.remat is not None and case.budget == INPUTS:
        remat_blocks(model, case.remat, cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0 if case.by_blocks else 10**9)
        shard_model(model, mesh, case.dtype)
    initialise_sharded(model, torch.device("cpu"), 3)
    stir(model)
    count = len(case.micro)
    sums = torch.zeros(count + 1)
    for i in range(mesh.data_rank, count, mesh.data_ranks):
        loss = micro_loss(model, config, case.micro[i])
        (loss * (mesh.data_ranks / count)).backward()
        if mesh.peer_index == 0:
            sums[i] = loss.detach()
    optimizer = ShardedAdamW(model, run_config(lr=LR, eps=EPS))
    sums[-1] = optimizer.grad_square_sum()
    torch.distributed.all_reduce(sums)
    norm = sums[-1].sqrt()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    optimizer.step(LR, clip_scale(norm, CLIP))
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return Step(sums[:-1].tolist(), float(norm), gradients, weights)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def differences(ours: Step, theirs: Step) -> dict[str, float]:
    """How far two steps are apart: losses and norm relative, gradients and updates over the largest of all."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    largest = max(float(g.abs().max()) for g in theirs.gradients.values())
    farthest = max(float((g - theirs.gradients[n]).abs().max()) for n, g in ours.gradients.items())
    updated = max(float((w - theirs.weights[n]).abs().max()) for n, w in ours.weights.items())
    return {
        "loss": max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "norm": abs(ours.norm - theirs.norm) / theirs.norm,
        "gradient": farthest / largest,
        "weight": updated,
    }


def compare(cases: Mapping[str, Case], world: World) -> dict[str, dict[str, float]]:
    """The differences of every case from one process."""
    alone: dict[str, Step] = {}
    found = {}
    for name, case in cases.items():
        key = json.dumps([case.micro, case.frozen, dict(case.model), case.lora, case.float8], sort_keys=True)
        if key not in alone:
            alone[key] = step_alone(case)
        found[name] = differences(step_on(case, world), alone[key])
    return found


Facts = dict[str, Any]
Play = Callable[[World], Facts]


def _play(rank: int, size: int, port: int, folder: Path, plays: Mapping[str, Play]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with start_world("cpu", timeout_seconds=240) as world:
        facts = {name: play(world) for name, play in plays.items()}
        (folder / f"{rank}.json").write_text(json.dumps(facts))


def on_ranks(size: int, folder: Path, plays: Mapping[str, Play]) -> list[Facts]:
    """What each play finds, by its name, on each rank of a world of `size` processes."""
    on_processes(_play, size, size, free_port(), folder, plays)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
