"""The rectified flow of Open-Sora 1.2 against what that program computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from longtake.diffusion.config import Flow1000Config
from longtake.diffusion.flow_1000 import Flow1000, size_ratio
from tests.buckets.tables import golden

V1_2 = "opensora_v1_2"
TRANSFORM = golden("timestep_transform.json", V1_2)


def flow(**keys: object) -> Flow1000:
    return Flow1000(Flow1000Config(**keys), 2)


def test_times_are_moved_as_in_open_sora_1_2() -> None:
    for row in TRANSFORM["rows"]:
        if 1 < row["frames"] < 17:
            continue
        own = flow(sample_method="uniform", transform_scale=row.get("scale", 1.0))
        drawn = torch.tensor(TRANSFORM["t"]) / 1000
        moved = own.times(drawn, (4, 1, 1, 1), (row["frames"], row["h"], row["w"]))
        np.testing.assert_allclose(moved.numpy(), row["out"], rtol=1e-6, atol=1e-4)


def test_short_clips_train_at_all_times() -> None:
    """Open-Sora 1.2 counts no latent frame of 2 to 16 frames, and trains them at t = 0 alone."""
    ratios = [size_ratio((frames, 512, 512)) for frames in range(1, 35)]
    assert ratios == sorted(ratios)
    assert [round(ratio**2) for ratio in ratios] == [1, *[1] * 3, *[2] * 4, *[3] * 4, *[4] * 4, *[5] * 17, 10]
    moved = flow(sample_method="uniform").times(torch.tensor([0.5, 1.0]), (4, 4, 8, 8), (16, 512, 512))
    assert moved.tolist() == pytest.approx([2 / 3 * 1000, 1000])


@pytest.mark.parametrize("case", golden("sample_t.json", V1_2), ids=lambda case: f"{case['loc']}-{case['scale']}")
def test_logit_normal_times_have_the_law_of_open_sora_1_2(case: dict) -> None:
    own = flow(timestep_mean=case["loc"], timestep_std=case["scale"], use_timestep_transform=False)
    assert own.timestep.law == "normal"
    standard = (torch.tensor(case["normal"]) - case["loc"]) / case["scale"]
    times = own.times(standard, (4, 1, 1, 1), None)
    np.testing.assert_allclose(times.numpy() / 1000, case["first"], atol=1e-6)
    many = own.times(torch.special.ndtri(torch.linspace(1e-5, 1 - 1e-5, 100_001)), (4, 1, 1, 1), None) / 1000
    np.testing.assert_allclose(torch.quantile(many, torch.tensor(case["q"])).numpy(), case["quantiles"], rtol=0.02)


def test_the_path_and_the_target_are_those_of_x0_minus_noise() -> None:
    own, clean, noise = flow(use_discrete_timesteps=True, sample_method="uniform"), *torch.randn(2, 2, 4, 5, 2, 2)
    noised = own.noise(clean, {"noise": noise, "timestep": torch.tensor([250, 999])}, shape=(17, 512, 512))
    ratio = math.sqrt(5)
    share = torch.tensor([ratio * t / (1 + (ratio - 1) * t) for t in (0.25, 0.999)])
    assert (noised.t / 1000).tolist() == pytest.approx(share.tolist(), abs=1e-5)
    torch.testing.assert_close(noised.target, clean - noise)
    column = noised.t[:, None, None, None, None] / 1000
    torch.testing.assert_close(noised.x, (1 - column) * clean + column * noise)


def test_solvers_walk_the_same_law() -> None:
    shape, own = (51, 240, 426), flow()
    assert flow(use_discrete_timesteps=True, sample_method="uniform").grid(7, (4, 15, 30, 53), None).tolist() == [
        1000, 857, 714, 571, 429, 286, 143, 0,
    ]  # fmt: skip
    straight, moved = own.grid(5, (4, 15, 30, 53), None, shape), own.grid(5, (4, 15, 30, 53), "training", shape)
    assert straight.tolist() == [1000, 800, 600, 400, 200, 0]
    torch.testing.assert_close(moved, flow(sample_method="uniform").times(straight / 1000, (4, 15, 30, 53), shape))
    assert own.grid(2, (4, 15, 30, 53), 3.0, shape).tolist() == [1000, 750, 0]


def test_whole_times_are_drawn_uniformly() -> None:
    with pytest.raises(ValidationError, match=r'sample_method = "logit-normal".*write "uniform"'):
        Flow1000Config(use_discrete_timesteps=True)
