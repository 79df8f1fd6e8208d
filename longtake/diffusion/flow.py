"""Rectified flow: the straight path from clean latents to noise, as training examples, loss and solver velocity.

Liu et al., "Flow Straight and Fast", 2022; with sigma_min as in Lipman et al., "Flow Matching", 2023. With clean
latents x0, noise x1, time t in [0, 1] and sigma = sigma_min:

    x(t) = (1 - t) x0 + s(t) x1,    s(t) = t + sigma (1 - t)
    v    = dx/dt = (1 - sigma) x1 - x0

The network may predict v, x0 or x1. Solving the path for v turns each into the others exactly:

    v = ((1 - sigma) x - x0) / s(t)      so an error e of x0 is an error -e / s(t) of v
    v = (x1 - x) / (1 - t)               so an error e of x1 is an error  e / (1 - t) of v

Hence the loss weights 1 / s^2 and 1 / (1 - t)^2 make clean and noise prediction minimise the velocity loss; their
divisors are kept above `min_t`, or a few samples would rule the gradient.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from longtake.contracts import Draw
from longtake.diffusion.config import FlowConfig, Shift
from longtake.diffusion.known import PixelShape
from longtake.diffusion.multistep import flow_solver
from longtake.diffusion.objective import Objective, as_column
from longtake.diffusion.solvers import Solver
from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal
from longtake.random import Purpose

# At the clean end a solver divides by s(t) and multiplies by a step of at most t: the quotient may be large, only not
# infinite. So the floor there is that of float32 rounding, not `min_t`, which would leave noise in the last step.
_CLEAN_FLOOR = 1e-5
SHIFT_OF_PATCH_2 = "shift_of_patch_2"  # quirk


class StraightFlow(Objective):
    """The straight path in a unit of time of its own: x(t) = (1 - s) x0 + s x1 with s = t / noise_time.

    The denoiser is asked for x0 - x1. `times` takes uniform numbers to times, in training and for solvers alike.
    """

    timestep: Draw = Draw(Purpose.TIMESTEP, "uniform", stratified=True)

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return (1 - t / self.noise_time) * clean + t / self.noise_time * noise

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return clean - noise

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """dx/dt, float32 [B, C, F, h, w]."""
        return prediction.float() / -self.noise_time

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        return self.times(torch.linspace(1, 0, num_steps + 1), latent_shape, shape)

    def solver(self, name: str, num_steps: int) -> Solver:
        """One of `FLOW_SOLVERS`."""
        return flow_solver(name, self.noise_time)


class RectifiedFlow(Objective):
    """The objective of rectified flow (`Objective`). Times are float32 in [0, 1], 1 is noise.

    `patch_size`: pixels of the latent grid on one side of a token, which the resolution shift counts tokens by. The
    quirk `shift_of_patch_2` draws training times with the shift of a patch of 2, whatever the patch is, as Open-Sora
    2.0 does; sampling then still uses the real patch, as it does there.
    """

    noise_time: ClassVar[float] = 1.0
    timestep: ClassVar[Draw] = Draw(Purpose.TIMESTEP, "normal")
    config: FlowConfig

    def times(self, drawn: Tensor, latent_shape: tuple[int, ...], shape: PixelShape | None) -> Tensor:
        """Return the sigmoids of normals, shifted."""
        t = sigmoid_normal(drawn, self.config.timestep_mean, self.config.timestep_std)
        return shift_time(t, self._alpha(self.config.shift, latent_shape, training=True))

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x(t), float32 [B, C, F, h, w]; t: float32, of any shape that broadcasts."""
        return (1 - t) * clean + self._noise_level(t) * noise

    def solver(self, name: str, num_steps: int) -> Solver:
        """One of `FLOW_SOLVERS`."""
        return flow_solver(name, self.noise_time)

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity dx/dt that a prediction stands for, float32 [B, C, F, h, w]; t: float32 [B].

        Finite at both ends of time. Noise prediction says nothing about the video near t = 1, where its velocity is
        an error divided by almost 0; there the divisor stays at `min_t`, as in the loss.
        """
        prediction, x = prediction.float(), x.float()
        match self.config.predict:
            case "velocity":
                return prediction
            case "clean":
                level = as_column(self._noise_level(t).clamp_min(_CLEAN_FLOOR))
                return ((1 - self.config.sigma_min) * x - prediction) / level
            case "noise":
                return (prediction - x) / as_column((1 - t.float()).clamp_min(self.config.min_t))

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | Literal["training"] = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """Return the solver's times for latents (C, F, h, w): float32 [num_steps + 1] from 1 to 0.

        shift: "training" is the configured one; otherwise as in `FlowConfig.shift`.
        """
        if shift == "training":
            shift = self.config.shift
        return make_grid(num_steps, self._alpha(shift, latent_shape, training=False))

    def _alpha(self, shift: Shift, latent_shape: tuple[int, ...], *, training: bool) -> float:
        """Return the shift for latents (C, F, h, w)."""
        if shift is None:
            return 1.0
        if shift != "resolution":
            return float(shift)
        _, num_frames, height, width = latent_shape
        if training and SHIFT_OF_PATCH_2 in self.quirks:
            return resolution_shift(height * width // 4, num_frames)
        return resolution_shift(-(-height // self.patch_size) * -(-width // self.patch_size), num_frames)

    def _noise_level(self, t: Tensor) -> Tensor:
        """s(t), the factor of the noise in x(t); float32 [B]."""
        return t.float() + self.config.sigma_min * (1 - t.float())

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the velocity, the clean latents or the noise."""
        match self.config.predict:
            case "velocity":
                return (1 - self.config.sigma_min) * noise - clean
            case "clean":
                return clean
            case "noise":
                return noise

    def weight(self, t: Tensor) -> Tensor:
        """Return the factor that makes the loss of this prediction the loss of the velocity; float32 [B]."""
        match self.config.predict:
            case "velocity":
                return torch.ones_like(t)
            case "clean":
                return self._noise_level(t).clamp_min(self.config.min_t) ** -2
            case "noise":
                return (1 - t).clamp_min(self.config.min_t) ** -2
