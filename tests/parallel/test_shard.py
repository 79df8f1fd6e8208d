"""What FSDP is told: prefetch depths in both orders, the dtype of sums, and what lives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from longtake.parallel import Mesh, ParallelConfig, World, offloads, shard_model, start_world


class Unit:
    """Stands for a sharded block; keeps what it is told to gather ahead."""

    def __init__(self, number: int | None) -> None:
        self.number = number
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
    """The units of a model of four blocks, and the options of the last one."""
    model = nn.Module()
    model.blocks = ("layers",)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    units: list[Unit] = []
    options: dict[str, Any] = {}

    def fully_shard(module: nn.Module, **given: Any) -> Unit:
        units.append(Unit(len(units)))
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
    assert options["reshard_after_forward"] is True


def test_sums_may_be_made_in_bf16(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    _, options = told(monkeypatch, world, reduce_dtype="bf16", zero=2)
    assert options["mp_policy"].reduce_dtype == torch.bfloat16
    assert options["reshard_after_forward"] is False


def test_only_another_device_has_something_to_offload(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    mesh = Mesh.create(ParallelConfig(cpu_offload=True), world)
    assert not offloads(mesh)
    monkeypatch.setattr("longtake.parallel.shard.offloads", lambda mesh: True)
    _, options = told(monkeypatch, world, cpu_offload=True)
    assert isinstance(options["offload_policy"], CPUOffloadPolicy)
    monkeypatch.setattr("longtake.parallel.shard.offloads", lambda mesh: False)
    _, options = told(monkeypatch, world)
    assert type(options["offload_policy"]) is OffloadPolicy
