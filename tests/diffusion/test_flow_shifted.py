"""Times, weights and grids of shifted flow against those of VideoX-Fun, musubi-tuner, diffusion-pipe and DiffSynth.

The numbers are from `golden/wan/training` of the reference programs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.config.faults import ConfigError
from longtake.contracts import UserError
from longtake.diffusion.config import ShiftedFlowConfig
from longtake.diffusion.flow_shifted import ShiftedFlow
from tests.precision import within

LATENT = (16, 3, 4, 4)


def objective(**keys: Any) -> ShiftedFlow:
    return ShiftedFlow(ShiftedFlowConfig(**keys), patch_size=2)


def times(drawn: Tensor, **keys: Any) -> Tensor:
    return objective(**keys).times(drawn, LATENT, None)


def quantile_of_normal(z: list[float]) -> Tensor:
    return torch.special.ndtr(torch.tensor(z, dtype=torch.float64))


def test_uniform_times_are_videox_funs_and_diffsynths_shifted_grid() -> None:
    grids = {  # shift -> timesteps of VideoX-Fun at these indices of 1,000; DiffSynth's at 5 are the same
        1.0: [1000.0, 643.0, 368.0, 1.0],
        3.0: [1000.0, 843.83203125, 635.9446411132812, 2.9940121173858643],
        5.0: [1000.0, 900.0560302734375, 744.3365478515625, 4.9800801277160645],
        12.0: [1000.0, 955.778564453125, 874.8019409179688, 11.869436264038086],
    }
    indices = torch.tensor([0, 357, 632, 999])
    for shift, expected in grids.items():
        found = times(1 - indices / 1000, shift=shift)
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-3, rtol=0)


def test_logit_normal_times_are_musubis_and_diffusion_pipes() -> None:
    z = [0.7094957232475281, 0.9698306322097778, 0.7283675670623779, -0.25399959087371826]
    found = times(quantile_of_normal(z), law="logit_normal", shift=3.0)
    levels = [0.8591329455375671, 0.8877979516983032, 0.8614014983177185, 0.6994357705116272]
    torch.testing.assert_close(found, 1000 * torch.tensor(levels), atol=1e-3, rtol=0)
    # musubi's logsnr of mean .2 and deviation 1.1 is the sigmoid of a normal of half of them, the sign turned
    drawn = [0.5323732495307922, 0.8658053874969482, 1.644835352897644, -1.6162185668945312]
    z = [-(value - 0.2) / 1.1 for value in drawn]
    found = times(quantile_of_normal(z), law="logit_normal", timestep_mean=-0.1, timestep_std=0.55, shift=1.0)
    levels = [0.4338434934616089, 0.39343342185020447, 0.30525070428848267, 0.6917064785957336]
    torch.testing.assert_close(found, 1000 * torch.tensor(levels), atol=1e-3, rtol=0)


def test_a_range_is_the_part_of_the_law_that_diffusion_pipe_cuts_from_its_table() -> None:
    """`drawn` are places in the table of 10,000 quantiles that is left, which is off by a place at either end."""
    cases = (
        (0.875, 1.0, 12.0, 1.0, 7051, [732, 4477, 1735, 5650], [895.4989, 958.3681, 917.2646, 972.4774]),
        (0.0, 0.875, 5.0, 1.4, 5950, [1539, 2556, 5649, 4841], [545.4116, 665.9677, 862.7545, 825.4628]),
    )
    for low, high, shift, scale, length, drawn, expected in cases:
        law = {"law": "logit_normal", "timestep_std": scale, "shift": shift, "time_range": (low, high)}
        found = times(torch.tensor(drawn) / (length - 1), **law)
        torch.testing.assert_close(found, torch.tensor(expected), atol=0.3, rtol=0)


@pytest.mark.parametrize("law", ["uniform", "logit_normal", "mode"])
def test_a_range_holds_the_same_law_and_nothing_else(law: Any) -> None:
    drawn = torch.linspace(0, 1, 100_001)
    whole = times(drawn, law=law, shift=12.0)
    low, high = 0.3, 0.875
    inside = whole[(whole >= 1000 * low) & (whole <= 1000 * high)]
    part = times(drawn, law=law, shift=12.0, time_range=(low, high))
    assert part.min() >= 1000 * low
    assert part.max() <= 1000 * high
    for share in (0.1, 0.5, 0.9):
        assert within((part.quantile(share) - inside.quantile(share)).abs(), 0.2)


def test_mode_is_that_of_diffusers() -> None:
    u = torch.linspace(0, 0.99, 34, dtype=torch.float64)
    density = 1 - u - 1.29 * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)  # an index into a grid that descends
    torch.testing.assert_close(times(u, law="mode", shift=1.0).double(), 1000 * (1 - density), atol=1e-3, rtol=0)


def test_weights_are_those_of_the_trainers() -> None:
    sigmas = torch.tensor([0.7964441776275635, 0.40768197178840637])
    found = objective(weighting="sigma_sqrt").weight(1000 * sigmas)
    torch.testing.assert_close(found, torch.tensor([1.576483130455017, 6.01668119430542]), rtol=1e-5, atol=0)
    found = objective(weighting="cosmap").weight(torch.tensor([500.0]))
    torch.testing.assert_close(found, torch.tensor([4 / math.pi]), rtol=1e-5, atol=0)
    t = torch.tensor([1000.0, 999.5994262695312, 909.21484375, 833.3333129882812, 9.920635223388672])
    expected = torch.tensor([0.0, 0.00256416, 0.57452142, 1.02486193, 0.06349884])  # of DiffSynth
    # its lowest is at noise, so that differences of two near-equal numbers are left
    torch.testing.assert_close(objective(weighting="bell", shift=5.0).weight(t), expected, rtol=1e-5, atol=1e-6)


def test_the_denoiser_is_asked_for_noise_minus_data_and_one_step_leads_from_noise_to_data() -> None:
    flow = objective(shift=3.0)
    clean, noise = torch.randn(2, *LATENT), torch.randn(2, *LATENT)
    noised = flow.noise(clean, {"noise": noise, "timestep": torch.tensor([0.25, 0.75])})
    torch.testing.assert_close(noised.target, noise - clean)
    share = (noised.t / 1000)[:, None, None, None, None]
    torch.testing.assert_close(noised.x, (1 - share) * clean + share * noise)
    grid = flow.grid(1, LATENT)
    assert grid.tolist() == [1000.0, 0.0]
    x = flow.solver("euler", 1).sample(lambda x, t, step: flow.velocity(noise - clean, x, t), noise, grid)
    torch.testing.assert_close(x, clean, atol=1e-5, rtol=0)
    torch.testing.assert_close(flow.grid(2, LATENT), torch.tensor([1000.0, 750.0, 0.0]))
    torch.testing.assert_close(flow.grid(2, LATENT, None), torch.tensor([1000.0, 500.0, 0.0]))
    with pytest.raises(UserError, match="shifts by a number"):
        flow.grid(2, LATENT, "resolution")


@pytest.mark.parametrize("bounds", [(0.9, 0.1), (0.5, 0.5), (-0.1, 1.0), (0.0, 1.5)])
def test_a_range_that_is_not_one_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises((ValueError, ConfigError), match="the lower first"):
        ShiftedFlowConfig(time_range=bounds)


@pytest.mark.parametrize("law", ["uniform", "logit_normal", "mode"])
def test_the_parts_on_both_sides_of_a_boundary_make_up_the_law(law: Any) -> None:
    whole = objective(law=law, shift=12.0)
    share, boundary = whole.share_below(0.875), 0.875
    low, high = (ShiftedFlow(whole.config.within(*ends), patch_size=2) for ends in ((0, boundary), (boundary, 1)))
    quantiles = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    below = quantiles < share
    expected = whole.times(quantiles, LATENT, None)
    torch.testing.assert_close(low.times(quantiles[below] / share, LATENT, None), expected[below])
    torch.testing.assert_close(high.times((quantiles[~below] - share) / (1 - share), LATENT, None), expected[~below])
    cut = objective(law=law, shift=12.0, time_range=(0.5, 0.95))
    assert cut.config.within(0.875, 1.0).time_range == (0.875, 0.95)
    assert (cut.share_below(0.5), cut.share_below(0.95)) == (0.0, 1.0)
    assert cut.config.within(0.95, 1.0) is None
