"""Prediction of the noise: diffusers' schedule, noised latents and sampling, and the closed form of v."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from longtake.diffusion.config import NoisePredictionConfig
from longtake.diffusion.noise_prediction import NoisePrediction

BETAS = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}


@pytest.fixture
def objective() -> NoisePrediction:
    return NoisePrediction(NoisePredictionConfig(), patch_size=2)


def test_noised_latents_and_levels_are_those_of_ddpm_in_float64(objective: NoisePrediction) -> None:
    theirs = DDPMScheduler(**BETAS)
    theirs.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    torch.testing.assert_close(theirs.alphas_cumprod.float(), DDPMScheduler(**BETAS).alphas_cumprod)
    times = torch.tensor([0, 1, 499, 998, 999])
    assert torch.equal(objective.schedule.alpha(times), theirs.alphas_cumprod[times])
    clean, noise = torch.randn(2, 5, 4, 1, 6, 8, generator=torch.Generator().manual_seed(0)).unbind()
    noised = objective.noise(clean, {"noise": noise, "timestep": times})
    expected = theirs.add_noise(clean.double(), noise.double(), times)
    torch.testing.assert_close(noised.x.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(noised.target, noise)
    assert noised.weight.tolist() == [1] * 5
    assert torch.equal(noised.t, times.float())


@pytest.mark.parametrize("of_frames", [False, True])
def test_the_noise_says_v(objective: NoisePrediction, of_frames: bool) -> None:
    clean, noise = torch.randn(2, 3, 4, 2, 6, 8, generator=torch.Generator().manual_seed(1)).unbind()
    t = torch.tensor([[5.0, 40], [300, 7], [900, 650]]) if of_frames else torch.tensor([5.0, 300, 900])
    a = objective.schedule.alpha(t.view(3, 1, -1, 1, 1))
    x = (a.sqrt() * clean + (1 - a).sqrt() * noise).float()
    v = objective.velocity(noise, x, t)
    torch.testing.assert_close(v.double(), a.sqrt() * noise - (1 - a).sqrt() * clean, rtol=1e-4, atol=1e-4)


def test_ddim_is_diffusers_own(objective: NoisePrediction) -> None:
    theirs, weights = DDIMScheduler(**BETAS, clip_sample=False, timestep_spacing="trailing"), torch.tensor([0.3, 0.9])
    theirs.set_timesteps(10)
    grid = objective.grid(10, (4, 1, 6, 8))
    assert grid.tolist() == [*theirs.timesteps.tolist(), -1]

    def predicted(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return weights[0] * x.sin() + weights[1] * (t / 1000)

    x = start = torch.randn(2, 4, 1, 6, 8, generator=torch.Generator().manual_seed(2))
    for t in theirs.timesteps:
        x = theirs.step(predicted(x, t), t, x).prev_sample
    ours = objective.solver("ddim", 10).sample(
        lambda x, t, step: objective.velocity(predicted(x, t[0]), x, t), start, grid
    )
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)
