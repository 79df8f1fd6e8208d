"""What failures cost: the rates, the interval that loses least, and the goodput, against a run played out by chance."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from longtake.plan.failures import Failures, failure_words, forecast_failures
from longtake.plan.machine import Machine
from longtake.plan.report import plan_json
from longtake.plan.run import RunPlan, plan_run
from longtake.track.devices import gpu_named
from tests.plan.runs import run_config


def plan(gpus: int) -> RunPlan:
    return plan_run(run_config(), gpus, Machine(gpu_named("h100")))


def play(failures: Failures, interval: float, days: float, seed: int = 0) -> float:
    """The share of time in steps that count, of a run interrupted at exponential times."""
    rng = np.random.default_rng(seed)
    now, useful, end = 0.0, 0.0, days * 86400
    failure = rng.exponential(failures.between)
    while now < end:
        if now + interval + failures.stall <= failure:
            now, useful = now + interval + failures.stall, useful + interval
            continue
        now, failure = failure, failure + rng.exponential(failures.between)
        lost = failures.restart + failures.write  # the restart, and making again what was still being written
        while now + lost > failure:
            now, failure = failure, failure + rng.exponential(failures.between)
        now += lost
    return useful / now


@pytest.mark.parametrize("between", [3600.0, 6 * 3600.0])
def test_the_goodput_is_that_of_a_run_played_out_and_the_interval_loses_least(between: float) -> None:
    failures = Failures(between=between, restart=180.0, stall=20.0, write=30.0)
    best = failures.interval
    assert best == pytest.approx(sqrt(2 * 20 * between), rel=0.1)  # Young's
    assert play(failures, best, 3000) == pytest.approx(failures.goodput(best), abs=0.004)
    tried = [failures.goodput(best * factor) for factor in (0.5, 0.8, 1.25, 2)]
    assert failures.goodput(best) >= max(tried) - 1e-4
    assert 100 * (failures.goodput(best) - failures.goodput(best * 4)) > 1


def test_a_checkpoint_is_not_due_before_the_last_one_is_written_and_hopeless_machines_get_nowhere() -> None:
    slow = Failures(between=86400.0, restart=60.0, stall=0.5, write=900.0)
    assert slow.interval == 900.0
    assert Failures(between=1.0, restart=600.0, stall=60.0, write=1000.0).goodput(100.0) == 0.0


def test_a_plan_says_what_failures_cost_by_nodes_and_by_what_was_measured() -> None:
    one, many = plan(gpus=8), plan(gpus=64)
    assert forecast_failures(one).between == pytest.approx(8 * forecast_failures(many).between)
    assert forecast_failures(one).between == pytest.approx(86400 * 54 * 2048 / 419)
    measured = replace(many, machine=replace(many.machine, restart=77.0, stall=11.0, interruptions=0.5))
    found = forecast_failures(measured)
    assert (found.restart, found.stall, found.between) == (77.0, 11.0, 86400 / (0.5 * 8))
    data = json.loads(json.dumps(plan_json(measured)))["failures"]
    assert data["interruptions_a_day"] == pytest.approx(4.0)
    assert data["goodput"] == pytest.approx(found.goodput(found.interval))
    assert f"goodput {found.goodput(found.interval):.1%}"[:-2] in failure_words(measured)
    faster = replace(many, machine=replace(many.machine, storage=10 * Machine.storage))
    assert forecast_failures(faster).write == pytest.approx(forecast_failures(many).write / 10)
