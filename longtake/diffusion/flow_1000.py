"""Rectified flow of Open-Sora 1.2: times from 0 to 1000, moved towards noise for large and long clips.

The path and the target, x0 - noise, are those of `StraightFlow`. With s = t / 1000 and a clip of H x W pixels that has
F latent frames, a time that was drawn becomes

    r s / (1 + (r - 1) s),    r = scale sqrt(H W / 512^2) sqrt(F)

Open-Sora 1.2 counts 5 latent frames for each whole 17 of a clip, so none for 2 to 16 frames, which then always train at
t = 0. Here they count as the latent frames that they are.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from longtake.contracts import Draw, UserError
from longtake.diffusion.config import Flow1000Config, Shift
from longtake.diffusion.flow import StraightFlow
from longtake.diffusion.known import PixelShape
from longtake.diffusion.timesteps import shift_time, sigmoid_normal
from longtake.random import Purpose

_CHUNK, _LATENTS, _TEMPORAL = 17, 5, 4  # frames of a chunk, its latent frames, and frames of one in a shorter clip
_AREA = 512**2


class Flow1000(StraightFlow):
    """The objective (`Objective`). Times are float32 in [0, 1000], 1000 is noise."""

    noise_time: ClassVar[float] = 1000.0
    config: Flow1000Config

    @property
    def timestep(self) -> Draw:
        if self.config.use_discrete_timesteps:
            return Draw(Purpose.TIMESTEP, "integer", below=int(self.noise_time))
        return Draw(Purpose.TIMESTEP, "normal" if self.config.sample_method == "logit-normal" else "uniform")

    def times(self, drawn: Tensor, latent_shape: tuple[int, ...], shape: PixelShape | None) -> Tensor:
        """Integers as they are, uniform numbers, or sigmoids of normals; then moved."""
        if self.config.use_discrete_timesteps:
            share = drawn.float() / self.noise_time
        elif self.config.sample_method == "logit-normal":
            share = sigmoid_normal(drawn, self.config.timestep_mean, self.config.timestep_std)
        else:
            share = drawn.float()
        return self.noise_time * shift_time(share, self._ratio("training", shape))

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """Equal steps, rounded to whole times where they are in training, then moved as there; `shift`: a ratio of its
        own, or None for 1."""
        if num_steps < 1:
            raise UserError(f"num_steps = {num_steps}: a solver needs at least 1 step")
        steps = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        if self.config.use_discrete_timesteps:
            steps = (steps * self.noise_time).round() / self.noise_time
        return self.noise_time * shift_time(steps, self._ratio(shift, shape)).float()

    def _ratio(self, shift: Shift | str, shape: PixelShape | None) -> float:
        if shift == "training":
            return self.config.transform_scale * size_ratio(shape) if self.config.use_timestep_transform else 1.0
        if shift is None:
            return 1.0
        return size_ratio(shape) if shift == "resolution" else float(shift)


def size_ratio(shape: PixelShape | None) -> float:
    """How far the times of clips (T, H, W) are moved towards noise."""
    assert shape is not None, "the law of times wants the size of the clip"
    num_frames, height, width = shape
    whole = num_frames // _CHUNK * _LATENTS
    frames = 1 if num_frames == 1 else whole or -(-num_frames // _TEMPORAL)
    return math.sqrt(height * width / _AREA) * math.sqrt(frames)
