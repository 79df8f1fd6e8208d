"""Measured steps correct the batch sizes that a plan suggests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from longtake.contracts import Bucket, UserError
from longtake.parallel.world import start_world
from longtake.plan.machine import Machine
from longtake.plan.probe import Measured, ProbeStep, as_measured, check_probe, probe_entries
from longtake.plan.report import plan_json, stage_words
from longtake.plan.run import RunPlan, plan_run
from longtake.plan.speed import update_seconds
from longtake.presets import find_preset
from longtake.track.devices import gpu_named
from longtake.train.config import RunWithoutTable
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run_file import read_run
from tests.plan.runs import run_config


def planned(mib: float = 2000.0, target: float | None = None, **changes: object) -> RunPlan:
    machine = Machine(replace(gpu_named("h100"), memory_gib=mib / 1024), headroom=0)
    return plan_run(run_config(**changes), 1, machine, target)


def measured_as(plan: RunPlan, factor: float, told: list[int]):
    """A machine that needs `factor` times the forecast, and runs out of memory above what may be used."""

    def measure(bucket: Bucket, batch: int) -> Measured:
        told.append(batch)
        needed = int(factor * plan.work.memory(bucket, plan.layout, batch).total)
        if needed > 1.1 * plan.machine.usable_bytes:
            return Measured(batch, None, None)
        return Measured(batch, 0.01 * batch * plan.work.tokens(bucket), needed)

    return measure


@pytest.mark.parametrize("factor", [0.7, 0.95, 1.0, 1.05, 1.4])
def test_the_largest_batch_is_found_from_either_side_in_a_few_steps(factor: float) -> None:
    plan, told = planned(), []
    for one in probe_entries(plan, measured_as(plan, factor, told)):

        def needs(batch: int, bucket: Bucket = one.entry.bucket) -> float:
            return factor * plan.work.memory(bucket, plan.layout, batch).total

        assert one.largest is not None
        assert needs(one.largest.batch) <= plan.machine.usable_bytes
        assert needs(int(1.03 * one.largest.batch) + 1) > plan.machine.usable_bytes
        assert one.error == pytest.approx(1 / factor - 1, abs=1e-3)
    assert len(told) <= 12


def test_what_was_measured_gives_the_length_of_the_stage() -> None:
    plan = planned()
    machine = measured_as(plan, 1.0, [])
    probed = probe_entries(plan, lambda bucket, batch: machine(bucket, bucket.batch_size))
    measured = as_measured(plan, probed).forecast
    buckets = [one.entry.bucket for one in probed]
    mean = sum(0.01 * bucket.batch_size * plan.work.tokens(bucket) for bucket in buckets) / len(buckets)
    update = update_seconds(plan.work.model, plan.layout, plan.machine)
    assert measured.step_seconds == pytest.approx(mean + update)
    assert measured.step_seconds > 10 * plan.forecast.step_seconds
    assert "s as measured" in stage_words(as_measured(plan, probed))


def test_corrected_batches_take_no_longer_than_the_longest_entry() -> None:
    plan = planned()
    probed = probe_entries(plan, measured_as(plan, 1.0, []))
    longest = max(probed, key=lambda one: one.entry.tokens)
    assert longest.suggested_batch == longest.largest.batch
    limit = longest.largest.seconds
    for one in probed:
        assert one.suggested_batch * one.largest.seconds / one.largest.batch <= 1.02 * limit


@pytest.mark.parametrize("target", [3.0, 20.0, 40.0, 1000.0])
@pytest.mark.parametrize("memory_known", [True, False])
def test_under_a_target_the_largest_batch_is_measured_that_keeps_to_it(target: float, memory_known: bool) -> None:
    plan, update = planned(target=target), update_seconds(planned().work.model, planned().layout, planned().machine)

    def seconds(bucket: Bucket, batch: int) -> float:
        return 1.0 + 0.02 * batch * plan.work.tokens(bucket)  # slower than forecast, and not from nothing

    def measure(bucket: Bucket, batch: int) -> Measured:
        needed = plan.work.memory(bucket, plan.layout, batch).total if memory_known else None
        return Measured(batch, seconds(bucket, batch), needed)

    for one in probe_entries(plan, measure, memory_known):
        fits = one.entry.largest_batch if memory_known else 4 ** (len(one.tries) - 1) * one.entry.bucket.batch_size
        right = max((n for n in range(1, fits + 1) if seconds(one.entry.bucket, n) + update <= target), default=0)
        assert one.suggested_batch == right, [step.batch for step in one.tries]
        assert right == 0 or right in [step.batch for step in one.tries], "confirmed, not computed"


def test_where_nothing_fits_none_is_suggested() -> None:
    plan = planned()
    for one in probe_entries(plan, lambda bucket, batch: Measured(batch, None, None)):
        assert (one.largest, one.suggested_batch, one.error) == (None, 0, None)


def test_real_steps_are_timed_on_a_cpu() -> None:
    config = run_config(
        bucket_config={"64px": {8: (1.0, 1), 16: (1.0, 1)}},
        device="cpu",
        cpu_threads=1,
        ema_decay=0.9,
        model={"grad_ckpt_settings": (1, 2), "recompute": "selective", "grad_ckpt_buffer_size": 1 << 24},
    )
    plan = plan_run(config, 1, Machine(gpu_named("h100")))
    plan = replace(plan, entries=tuple(replace(entry, suggested_batch=1) for entry in plan.entries))
    with start_world("cpu") as world:
        step = ProbeStep(plan, config, world, lambda denoiser: WeightUpdate(denoiser, config).at_rate_zero)
        probed = probe_entries(plan, step.measure)
    assert [one.largest.batch for one in probed] == [1, 1]
    assert all(one.largest.seconds > 0 and one.largest.peak_bytes is None for one in probed)
    assert set(json.loads(json.dumps(plan_json(plan, probed)))["probe"]) == {"64px/8f", "64px/16f"}


def test_a_probe_holds_both_denoisers_and_the_state_of_each() -> None:
    config = read_run(str(find_preset("wan/lora_a14b")), ["--tiny", "--device", "cpu"], schema=RunWithoutTable).value
    plan = plan_run(config, 1, Machine(gpu_named("h100")))
    updates: list[WeightUpdate] = []

    def make_update(denoiser: nn.Module) -> Callable[[], None]:
        updates.append(WeightUpdate(denoiser, config))
        return updates[-1].at_rate_zero

    with start_world("cpu") as world:
        step = ProbeStep(plan, config, world, make_update)
        assert step.measure(plan.entries[0].bucket, 1).seconds > 0
    assert len(step.system.experts) == len(updates) == 2
    assert [update.optimizer.updates.item() for update in updates] == [2, 0]  # the first one warms up


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_does_no_harm_to_the_next(way: str) -> None:
    config = run_config(bucket_config={"64px": {8: (1.0, 1)}}, device="cpu", cpu_threads=1)
    plan = plan_run(config, 1, Machine(gpu_named("h100")))
    bucket = plan.entries[0].bucket
    with start_world("cpu") as world:
        step = ProbeStep(plan, config, world, lambda denoiser: WeightUpdate(denoiser, config).at_rate_zero)
        block = step.system.denoiser.single_blocks[0]
        block.register_forward_hook(lambda module, args, out: RunsOut.apply(out, way))
        del block
        assert step.measure(bucket, 2) == Measured(2, None, None)
        assert step.measure(bucket, 1).seconds > 0


class RunsOut(torch.autograd.Function):
    """Finds no memory on the way there or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: str) -> torch.Tensor:
        if way == "forward":
            raise torch.OutOfMemoryError
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError


def test_more_gpus_than_there_are_is_one_sentence() -> None:
    with start_world("cpu") as world:
        check_probe(1, world)
        with pytest.raises(UserError, match=r"--gpus 8: --probe .* 1 process runs; choose --gpus 1"):
            check_probe(8, world)
