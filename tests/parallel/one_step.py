"""One optimizer step of a tiny denoiser on any mesh, and in one process, to be compared (law 1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from longtake.models.build import build_denoiser
from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.models.lora import adapt
from longtake.parallel.compile import BlockCompiler, recompute_and_compile
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import CurrentLevel, Level
from longtake.parallel.shard import cut_model, initialise_sharded, local_tensor, own_part, shard_model
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World
from longtake.system.float8 import use_float8
from longtake.system.lora import adapter_sizes
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale
from tests.models.initialised import initialise
from tests.parallel.tiny import FAMILIES, micro_loss, stir
from tests.precision import within
from tests.ranks import Facts
from tests.train.optimizer.test_schedule import run_config

LR, EPS, CLIP = 1e-2, 1e-2, 0.05
NO_GRADIENT = {"y_embedder.y_embedding"}  # of STDiT3, which stands for captions that were dropped


@dataclass(frozen=True)
class Case:
    """How one step is made."""

    parallel: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    family: type = MMDiTConfig  # of `FAMILIES`
    micro: tuple[int, ...] = (0, 1, 2, 3)  # micro-batches of the step
    remat: tuple[int, ...] | None = None  # how many first blocks of each list are recomputed, at most all
    level: Level = "full"  # of these
    frozen: tuple[str, ...] = ()  # parameters whose names hold one of these are not trained
    by_blocks: bool = True  # each block gathered by itself
    compiled: str | None = None  # the compiler's backend
    static: bool = False  # a graph for every size
    lora: Mapping[str, Any] | None = None  # the section of that name: adapters train in place of the model
    dtype: torch.dtype = torch.float32  # of compute
    float8: bool = False  # products of blocks


@dataclass(frozen=True)
class Step:
    """What came of a step. On a mesh tensors are sharded."""

    losses: list[float]
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    compiled: dict[str, int]  # by list of blocks: shapes that made a graph
    graphs: int = 0  # that were made
    breaks: int = 0  # of graphs


def freeze(model: nn.Module, parts: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def built(case: Case) -> nn.Module:
    """The model, of which all but the frozen trains, or adapters."""
    family = FAMILIES[case.family]
    model = build_denoiser(family.config(**case.model))
    if case.lora is None:
        freeze(model, case.frozen)
    else:
        lora = LoraConfig(**case.lora)
        adapt(model, adapter_sizes(family.format, model, lora, {}), lora.base, torch.float32)
    if case.float8:
        use_float8(model, torch.device("cpu"))
    return model


def step_alone(case: Case) -> Step:
    """The step in one process, without any parallel code."""
    model = built(case)
    initialise(model, 3)
    stir(model)
    losses = [micro_loss(model, i) for i in case.micro]
    (sum(losses) / len(losses)).backward()
    optimizer = ShardedAdamW(model, run_config(lr=LR, eps=EPS))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, p in model.named_parameters() if p.requires_grad} - gradients.keys() <= NO_GRADIENT
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    optimizer.step(LR, clip_scale(norm, CLIP))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Step([loss.item() for loss in losses], float(norm), gradients, weights, {})


def step_on(case: Case, world: World) -> Step:
    """The step on a mesh, as the training loop makes it. Collective."""
    torch.compiler.reset()  # a run compiles one model; after others sizes are left open, which takes minutes
    counters.clear()
    mesh = Mesh.create(ParallelConfig(**case.parallel), world)
    with torch.device("meta"):
        model = built(case)
    cut = cut_model(model, mesh)
    compiled = _prepare_blocks(model, case, cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0 if case.by_blocks else 10**9)
        shard_model(model, mesh, case.dtype)
    initialise_sharded(model, torch.device("cpu"), 3)
    stir(model)
    count = len(case.micro)
    sums = torch.zeros(count + 1)
    for i in range(mesh.data_rank, count, mesh.data_ranks):
        loss = micro_loss(model, case.micro[i])
        (loss * (mesh.data_ranks / count)).backward()
        if mesh.peer_index == 0:
            sums[i] = loss.detach()
    optimizer = ShardedAdamW(model, run_config(lr=LR, eps=EPS))
    sums[-1] = optimizer.grad_square_sum()
    torch.distributed.all_reduce(sums)
    norm = sums[-1].sqrt()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step(LR, clip_scale(norm, CLIP))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    made, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Step(sums[:-1].tolist(), float(norm), gradients, weights, compiled(), made, breaks)


def _prepare_blocks(model: nn.Module, case: Case, cut: TokenCut | None) -> Callable[[], dict[str, int]]:
    """Recomputes and compiles blocks; says after the step what was."""
    lists = [model.get_submodule(name) for name in model.blocks]
    counts = [0] * len(lists) if case.remat is None else list(map(min, case.remat, map(len, lists)))
    compiler = None if case.compiled is None else BlockCompiler(not case.static, backend=case.compiled)
    recompute_and_compile(model, counts, CurrentLevel(case.level), cut, compiler)
    if compiler is None:
        return dict
    return lambda: compiler.variants


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def differences(ours: Step, theirs: Step) -> dict[str, float]:
    """How far this rank's part of a step is from one of one process: losses and norm relative, gradients over the
    largest of all."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    largest = max(float(g.abs().max()) for g in theirs.gradients.values())
    return {
        "loss": max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "norm": abs(ours.norm - theirs.norm) / theirs.norm,
        "gradient": max(farthest(g, theirs.gradients[name]) for name, g in ours.gradients.items()) / largest,
        "weight": max(farthest(weight, theirs.weights[name]) for name, weight in ours.weights.items()),
    }


def farthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference between this rank's part of a tensor and that of a whole one, 0 where it has none."""
    mine, wanted = local_tensor(ours), own_part(theirs, ours)
    assert mine.shape == wanted.shape
    return float((mine - wanted).abs().max()) if mine.numel() else 0.0


def compare(cases: Mapping[str, Case], world: World) -> Facts:
    """How far every case is from one process, and what its compiled blocks were."""
    alone: dict[str, Step] = {}
    found = {}
    for name, case in cases.items():
        alike = [case.family.__name__, case.micro, case.frozen, dict(case.model), case.lora, case.float8]
        key = json.dumps(alike, sort_keys=True)
        if key not in alone:
            alone[key] = step_alone(case)
        step = step_on(case, world)
        found[name] = {
            **differences(step, alone[key]),
            "compiled": step.compiled,
            "graphs": step.graphs,
            "breaks": step.breaks,
        }
    return found


def assert_one_step(ranks: list[Facts], name: str) -> None:
    """Every rank found the step of one process."""
    for facts in ranks:
        far = facts[name]
        assert within(far["loss"], 1e-5), name
        assert within(far["norm"], 1e-5), name
        assert within(far["gradient"], 1e-5), name
        assert within(far["weight"], 1e-6), name
