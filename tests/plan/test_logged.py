"""A run's own log corrects the forecast of its steps, and says how far off it is."""

from __future__ import annotations

import pytest

from longtake.plan.logged import as_logged, compare_with_log, logged_words
from longtake.plan.machine import Machine
from longtake.plan.run import plan_run
from longtake.plan.speed import update_seconds
from longtake.track.devices import gpu_named
from tests.plan.runs import run_config


def test_the_log_of_a_run_says_how_far_off_its_forecast_is() -> None:
    plan = plan_run(run_config(), 1, Machine(gpu_named("h100")))
    update = update_seconds(plan.work.model, plan.layout, plan.machine)
    buckets = {one.num_frames: one for one in plan.work.rule.buckets if one.ratio == plan.entries[0].bucket.ratio}

    def line(step: int, frames: int, ratio: float) -> dict[str, object]:
        forecast = plan.work.time(buckets[frames], plan.layout, plan.machine).seconds + update
        return {"step": step, "seconds": ratio * forecast + 1.0, "wait": 1.0, "buckets": {buckets[frames].name: 0.5}}

    ratios = [1.9, 2.0, 2.0, 2.0, 2.1]
    lines = [line(1, 8, 50.0)] + [line(2 + i, frames, r) for frames in (8, 16) for i, r in enumerate(ratios)]
    lines.append(line(9, 8, 99.0) | {"skipped": True})
    logged = compare_with_log(plan, lines, left_out={1})
    assert logged is not None
    assert (logged.steps, logged.middle) == (10, pytest.approx(2.0))
    assert (logged.low, logged.high) == (pytest.approx(1.9), pytest.approx(2.1))
    assert logged.entries == pytest.approx({("64px", 8): 2.0, ("64px", 16): 2.0})
    assert "10 steps of this run's log took 2.00 times the forecast" in logged_words(logged)
    found = as_logged(plan, logged).forecast
    assert found.measured
    assert found.step_seconds == pytest.approx(2 * (plan.forecast.step_seconds - update) + update)
    assert compare_with_log(plan, lines[:2]) is None
