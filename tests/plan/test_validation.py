"""What a validation takes of a GPU, and what it puts out of its way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longtake.evaluate.validation import plan_validation
from longtake.plan.machine import Machine
from longtake.plan.run import plan_run
from longtake.plan.validation import ValidationForecast, forecast_validation
from longtake.track.devices import gpu_named
from tests.plan.runs import run_config

H200 = gpu_named("h200")


def forecast(gib: float = 141, option: dict[str, Any] | None = None, **section: Any) -> ValidationForecast:
    own = {"prompts": ("a cat",), "sampling_option": {"num_steps": 2, **(option or {})}, **section}
    config = run_config(validation=own, validate_every=10, ema_decay=0.99, model={"hidden_size": 512, "num_heads": 8})
    plan = plan_run(config, 1, Machine(replace(H200, memory_gib=gib), headroom=0.0))
    found = forecast_validation(plan, plan_validation(config, config.validation).requests())
    assert found is not None
    return found


def test_moments_and_average_wait_where_videos_have_no_room_beside_them() -> None:
    beside = forecast()
    assert not beside.offload
    assert beside.host_bytes == 0
    assert beside.states == pytest.approx(3 * beside.weights, rel=0.01)  # two moments and an average
    tight = forecast(gib=(beside.total - 1) / 2**30)
    assert tight.offload
    assert tight.fits
    assert tight.total == max(beside.weights + beside.denoising, beside.coding) + beside.encoders
    assert tight.host_bytes == beside.weights + beside.states
    assert forecast(offload=True) == replace(tight, usable=beside.usable)
    assert not forecast(gib=(beside.total - 1) / 2**30, offload=False).fits


def test_larger_videos_take_more_and_the_largest_of_a_table_counts(tmp_path: Any) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("text,num_frames\na cat,8\na dog,32\n")
    assert forecast(option={"num_frames": 32}).denoising > forecast(option={"num_frames": 8}).denoising
    assert forecast(prompts=str(table)) == forecast(option={"num_frames": 32})
