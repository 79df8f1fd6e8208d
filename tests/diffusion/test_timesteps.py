from __future__ import annotations

import pytest
import torch

from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal
from tests.diffusion.golden import read_json

SCHEDULES = read_json("schedules")


def test_the_resolution_shift_is_the_reference_line_times_the_root_of_the_frames() -> None:
    line = SCHEDULES["res_lin"]
    for tokens, alpha in zip(line["x"], line["y"], strict=True):
        assert resolution_shift(tokens, 1) == pytest.approx(alpha, rel=1e-12)
        assert resolution_shift(tokens, 9) == pytest.approx(3 * alpha, rel=1e-12)


@pytest.mark.parametrize("case", SCHEDULES["time_shift"], ids=lambda case: f"alpha={case['alpha']}")
def test_shifted_times_equal_the_reference(case: dict) -> None:
    shifted = shift_time(torch.tensor(case["t"]), case["alpha"])
    torch.testing.assert_close(shifted, torch.tensor(case["shifted"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", SCHEDULES["get_schedule"], ids=lambda case: f"{case['num_steps']}-steps")
def test_grids_equal_the_reference(case: dict) -> None:
    alpha = case["shift_alpha"] or resolution_shift(case["image_seq_len"], case["num_frames"])
    grid = make_grid(case["num_steps"], alpha if case["shift"] else 1.0)
    torch.testing.assert_close(grid, torch.tensor(case["timesteps"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 1.512, 11.87])
def test_a_grid_falls_from_exactly_one_to_exactly_zero(alpha: float) -> None:
    grid = make_grid(37, alpha)
    assert grid.dtype == torch.float32
    assert (grid[0], grid[-1]) == (1.0, 0.0)
    assert (grid.diff() < 0).all()


def test_a_grid_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps = 0"):
        make_grid(0)


def test_sigmoid_normal_times_follow_mean_and_std_in_float32() -> None:
    z = torch.linspace(-5, 5, 101, dtype=torch.float64)
    t = sigmoid_normal(z, mean=-1.0, std=0.5)
    assert t.dtype == torch.float32
    torch.testing.assert_close(torch.logit(t.double()), -1.0 + 0.5 * z, rtol=1e-4, atol=1e-5)
