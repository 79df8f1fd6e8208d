"""Prediction of the noise over 1,000 integer timesteps, as PixArt was trained.

x = sqrt(a) x0 + sqrt(1 - a) noise, where a is the product of (1 - beta) up to a timestep, beta linear in it (Ho et al.,
"Denoising Diffusion Probabilistic Models", 2020). The loss is that of the noise alone: what a network says of the
variance is not trained (Nichol and Dhariwal, 2021, train it by a bound of its own). Solvers take v = sqrt(a) noise -
sqrt(1 - a) x0, which x and the noise make together: v = (noise - sqrt(1 - a) x) / sqrt(a).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from longtake.contracts import Draw
from longtake.diffusion.config import NUM_TIMESTEPS, NoisePredictionConfig
from longtake.diffusion.v_prediction import OnTimesteps, Schedule
from longtake.random import Purpose


class NoisePrediction(OnTimesteps):
    """The objective (`Objective`)."""

    timestep: ClassVar[Draw] = Draw(Purpose.TIMESTEP, "integer", below=NUM_TIMESTEPS)
    config: NoisePredictionConfig

    def __init__(self, config: NoisePredictionConfig, patch_size: int, quirks: frozenset[str] = frozenset()) -> None:
        super().__init__(config, patch_size, quirks)
        self.schedule = Schedule.linear(config.beta_start, config.beta_end)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the noise."""
        return noise

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """v, float32 [B, C, F, h, w]; t: of samples [B], or of their frames [B, F]."""
        signal, level = self.schedule.factors(t.view(len(t), 1, -1, 1, 1))
        return (prediction.float() - level * x) / signal
