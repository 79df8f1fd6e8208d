"""Options of FSDP2: prefetch depths in both orders, the dtype of sums, what is gathered and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from longtake.models.build import build_denoiser
from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import gather_anew, initialise_sharded, local_tensor, offloads, shard_model
from longtake.parallel.world import World, start_world
from longtake.system.config import SystemConfig
from longtake.system.lora import choose_trained
from tests.models.golden import random_inputs, tiny_config


class Unit:
    """Stands for a sharded block; keeps what it is told to gather ahead."""

    def __init__(self, number: int | None, is_freed: bool) -> None:
        self.number, self.is_freed = number, is_freed
        self.ahead: dict[str, list[int | None]] = {}

    def set_modules_to_forward_prefetch(self, units: list[Unit]) -> None:
        self.ahead["forward"] = [unit.number for unit in units]

    def set_modules_to_backward_prefetch(self, units: list[Unit]) -> None:
        self.ahead["backward"] = [unit.number for unit in units]


@pytest.fixture
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


def told(monkeypatch: pytest.MonkeyPatch, world: World, **parallel: Any) -> tuple[list[Unit], dict[str, Any]]:
    """The units of a model of four blocks, the model being the last, and the options of the last one."""
    model = nn.Module()
    model.blocks = ("layers",)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    units: list[Unit] = []
    options: dict[str, Any] = {}

    def fully_shard(module: nn.Module, **given: Any) -> Unit:
        units.append(Unit(len(units), given["reshard_after_forward"]))
        options.update(given)
        return units[-1]

    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", fully_shard)
    monkeypatch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0)
    shard_model(model, Mesh.create(ParallelConfig(**parallel), world), torch.bfloat16)
    return units, options


def test_blocks_gather_those_that_come_next(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    units, _ = told(monkeypatch, world, forward_prefetch=2, backward_prefetch=1)
    assert [unit.ahead.get("forward") for unit in units] == [[1, 2], [2, 3], [3], None, None]
    assert [unit.ahead.get("backward") for unit in units] == [None, [0], [1], [2], None]


def test_without_a_depth_pytorch_decides(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    units, options = told(monkeypatch, world)
    assert all(not unit.ahead for unit in units)
    assert options["mp_policy"].reduce_dtype == torch.float32


def test_sums_may_be_made_in_bf16(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    _, options = told(monkeypatch, world, reduce_dtype="bf16", zero=2)
    assert options["mp_policy"].reduce_dtype == torch.bfloat16


@pytest.mark.parametrize("zero", [2, 3])
def test_last_block_and_what_is_in_none_stay_gathered_for_backward(
    zero: int, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    units, _ = told(monkeypatch, world, zero=zero)
    assert [unit.is_freed for unit in units] == [zero == 3] * 3 + [False, False]


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each parameter was gathered, by name."""
    counts: Counter[str] = Counter()
    gather = FSDPParam.init_unsharded_param

    def counted(self: FSDPParam) -> None:
        counts[self._param_fqn] += 1
        gather(self)

    monkeypatch.setattr(FSDPParam, "init_unsharded_param", counted)
    monkeypatch.setattr("longtake.parallel.shard.UNIT_PARAMETERS", 0)
    return counts


def built(world: World, **changes: Any) -> tuple[nn.Module, Any]:
    config = MMDiTConfig.model_validate({**tiny_config().model_dump(), "depth": 2, "depth_single_blocks": 2})
    run = SystemConfig.model_construct(model=config, freeze=(), train_only=None, **{"lora": None, **changes})
    with torch.device("meta"):
        model = build_denoiser(config)
    choose_trained(model, run, torch.float32)
    shard_model(model, Mesh.create(ParallelConfig(), world), torch.float32)
    initialise_sharded(model, torch.device("cpu"), seed=1)
    return model, random_inputs(config, (2, 4, 4))


@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=2), LoraConfig(rank=2, base="int8")], ids=["full", "lora", "8 bits"]
)
def test_frozen_parameters_of_one_gpu_are_not_copied_and_the_last_are_gathered_once(
    lora: LoraConfig | None, world: World, gathered: Counter[str]
) -> None:
    model, inputs = built(world, lora=lora)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    model(*inputs).sum().backward()
    once = {name for name in trained if name.startswith("single_blocks.1.") or "_blocks." not in name}
    assert once
    assert gathered == {name: 1 if name in once else 2 for name in trained}


def test_forward_without_gradients_sees_weights_that_have_changed_since_the_last(world: World) -> None:
    model, inputs = built(world)
    with torch.no_grad():
        first = model(*inputs)
        for parameter in model.parameters():
            local_tensor(parameter).mul_(1.5)
        changed = model(*inputs)
        assert not torch.equal(first, changed)
        gather_anew(model)
        assert torch.equal(model(*inputs), changed)


def test_only_another_device_has_something_to_offload(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    mesh = Mesh.create(ParallelConfig(cpu_offload=True), world)
    assert not offloads(mesh)
    monkeypatch.setattr("longtake.parallel.shard.offloads", lambda mesh: True)
    _, options = told(monkeypatch, world, cpu_offload=True)
    assert isinstance(options["offload_policy"], CPUOffloadPolicy)
    monkeypatch.setattr("longtake.parallel.shard.offloads", lambda mesh: False)
    _, options = told(monkeypatch, world)
    assert type(options["offload_policy"]) is OffloadPolicy
