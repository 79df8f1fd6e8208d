"""Rectified flow on times 0 to 1000, whose training times follow a named law, shifted by a number and cut to a range.

With s = t / 1000: x(t) = (1 - s) x0 + s x1, and the denoiser is asked for x1 - x0. A uniform number u becomes the time
of its quantile: a law s(u), then k s / (1 + (k - 1) s) with the shift k. A range of times takes the part of the law
inside it, exactly: u is moved to the share of the law between its ends.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.diffusion.config import NUM_TIMESTEPS, Shift, ShiftedFlowConfig
from longtake.diffusion.flow import StraightFlow
from longtake.diffusion.known import PixelShape
from longtake.diffusion.timesteps import shift_time

_BISECTIONS = 60  # of [0, 1] in float64
_BELL = 0.5  # centre of the `bell` weights, as a share of the way to noise


class ShiftedFlow(StraightFlow):
    """The objective (`Objective`). Times are float32 in [0, 1000], 1000 is noise."""

    noise_time: ClassVar[float] = float(NUM_TIMESTEPS)
    config: ShiftedFlowConfig

    def times(self, drawn: Tensor, latent_shape: tuple[int, ...], shape: PixelShape | None) -> Tensor:
        """Quantiles of the law inside its range; drawn: uniform."""
        low, high = self._range
        share = self._quantile(low + (high - low) * drawn.double())
        bounds = self.config.time_range
        return self.noise_time * share.clamp(*bounds).float()

    def _quantile(self, u: Tensor) -> Tensor:
        """Return the share of the way to noise, float64, of uniform numbers; increasing."""
        match self.config.law:
            case "uniform":
                share = u
            case "logit_normal":
                share = torch.sigmoid(self.config.timestep_mean + self.config.timestep_std * torch.special.ndtri(u))
            case "mode":
                share = u + self.config.mode_scale * (torch.cos(math.pi / 2 * u).square() - 1 + u)
        return shift_time(share, self.config.shift)

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The uniform numbers whose times are the ends of the range."""
        return tuple(self._uniform_of(end) for end in self.config.time_range)

    def _uniform_of(self, share: float) -> float:
        """Return the inverse of `_quantile`."""
        if share in (0.0, 1.0):
            return share
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            is_below = self._quantile(torch.tensor(middle, dtype=torch.float64)).item() < share
            low, high = (middle, high) if is_below else (low, middle)
        return (low + high) / 2

    def share_below(self, level: float) -> float:
        low, high = self._range
        return min(1.0, max(0.0, (self._uniform_of(level) - low) / (high - low)))

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return noise - clean

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return prediction.float() / self.noise_time

    def weight(self, t: Tensor) -> Tensor:
        share = t / self.noise_time
        match self.config.weighting:
            case "none":
                return torch.ones_like(t)
            case "sigma_sqrt":
                return share.clamp_min(1 / self.noise_time) ** -2
            case "cosmap":
                return 2 / (math.pi * (1 - 2 * share + 2 * share.square()))
            case "bell":
                lowest, mean = self._bell
                return (torch.exp(-2 * (share - _BELL).square()) - lowest) / mean

    @cached_property
    def _bell(self) -> tuple[float, float]:
        """The lowest value of the bell over the shifted grid, and its mean above that."""
        grid = shift_time(torch.linspace(1, 0, NUM_TIMESTEPS + 1, dtype=torch.float64)[:-1], self.config.shift)
        values = torch.exp(-2 * (grid - _BELL).square())
        lowest = values.min().item()
        return lowest, values.mean().item() - lowest

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """Equal steps, shifted; `shift`: a number other than that of training, or None for 1."""
        if num_steps < 1:
            raise UserError(f"num_steps = {num_steps}: a solver needs at least 1 step")
        if shift == "resolution":
            raise UserError(
                'sampling_option.shift = "resolution": this objective shifts by a number; write one, such as '
                f"{self.config.shift:g}"
            )
        factor = self.config.shift if shift == "training" else 1.0 if shift is None else float(shift)
        return self.noise_time * shift_time(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), factor).float()
