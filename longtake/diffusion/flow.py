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

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from longtake.contracts import Noised
from longtake.diffusion.config import FlowConfig, Shift
from longtake.diffusion.timesteps import make_grid, resolution_shift, shift_time, sigmoid_normal

# At the clean end a solver divides by s(t) and multiplies by a step of at most t: the quotient may be large, only not
# infinite. So the floor there is that of float32 rounding, not `min_t`, which would leave noise in the last step.
_CLEAN_FLOOR = 1e-5


class RectifiedFlow:
    """The objective of rectified flow. Times are float32 in [0, 1], 1 is noise.

    `patch_size`: pixels of the latent grid on one side of a token, which the resolution shift counts tokens by.
    `compat="opensora_v2"` draws training times with the shift of a patch of 2, whatever the patch is, as Open-Sora 2.0
    does; sampling then still uses the real patch, as it does there.
    """

    def __init__(self, config: FlowConfig, patch_size: int, compat: Literal["opensora_v2"] | None = None) -> None:
        self.config = config
        self.patch_size = patch_size
        self.compat = compat

    def noise(self, latents: Tensor, draws: Mapping[str, Tensor], weights: Tensor | None = None) -> Noised:
        """Makes training examples of latents.

        latents: [B, C, F, h, w], used as float32. draws: standard normals "noise" [B, C, F, h, w] and "timestep" [B].
        weights: [B], the samples' weights; latents of weight 0 are taken as zeros, so that not even an infinite one
        reaches the network (0 times infinity would be a NaN in every gradient).
        """
        clean = latents.float()
        noise = draws["noise"].to(clean)
        if noise.shape != clean.shape:
            raise ValueError(f"draws['noise'] has shape {tuple(noise.shape)}, the latents {tuple(clean.shape)}")
        if weights is not None:
            clean = torch.where(_as_column(weights.to(clean) > 0), clean, 0.0)
        normal = draws["timestep"].to(clean.device)
        t = sigmoid_normal(normal, self.config.timestep_mean, self.config.timestep_std)
        t = shift_time(t, self._alpha(self.config.shift, clean.shape[1:], training=True))
        column = _as_column(t)
        return Noised(
            x=(1 - column) * clean + _as_column(self._noise_level(t)) * noise,
            t=t,
            target=self._target(clean, noise),
            weight=self._weight(t),
        )

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The velocity dx/dt that a prediction stands for, float32 [B, C, F, h, w]; t: float32 [B].

        Finite at both ends of time. Noise prediction says nothing about the video near t = 1, where its velocity is
        an error divided by almost 0; there the divisor stays at `min_t`, as in the loss.
        """
        prediction, x = prediction.float(), x.float()
        match self.config.predict:
            case "velocity":
                return prediction
            case "clean":
                level = _as_column(self._noise_level(t).clamp_min(_CLEAN_FLOOR))
                return ((1 - self.config.sigma_min) * x - prediction) / level
            case "noise":
                return (prediction - x) / _as_column((1 - t.float()).clamp_min(self.config.min_t))

    def grid(
        self, num_steps: int, latent_shape: tuple[int, int, int, int], shift: Shift | Literal["training"] = "training"
    ) -> Tensor:
        """The solver's times for latents (C, F, h, w): float32 [num_steps + 1] from 1 to 0.

        shift: "training" is the configured one; otherwise as in `FlowConfig.shift`.
        """
        if shift == "training":
            shift = self.config.shift
        return make_grid(num_steps, self._alpha(shift, latent_shape, training=False))

    def _alpha(self, shift: Shift, latent_shape: tuple[int, ...], *, training: bool) -> float:
        """The shift for latents (C, F, h, w)."""
        if shift is None:
            return 1.0
        if shift != "resolution":
            return float(shift)
        _, num_frames, height, width = latent_shape
        if training and self.compat == "opensora_v2":
            return resolution_shift(height * width // 4, num_frames)
        return resolution_shift(-(-height // self.patch_size) * -(-width // self.patch_size), num_frames)

    def _noise_level(self, t: Tensor) -> Tensor:
        """s(t), the factor of the noise in x(t); float32 [B]."""
        return t.float() + self.config.sigma_min * (1 - t.float())

    def _target(self, clean: Tensor, noise: Tensor) -> Tensor:
        match self.config.predict:
            case "velocity":
                return (1 - self.config.sigma_min) * noise - clean
            case "clean":
                return clean
            case "noise":
                return noise

    def _weight(self, t: Tensor) -> Tensor:
        """The factor that makes the loss of this prediction the loss of the velocity; float32 [B]."""
        match self.config.predict:
            case "velocity":
                return torch.ones_like(t)
            case "clean":
                return self._noise_level(t).clamp_min(self.config.min_t) ** -2
            case "noise":
                return (1 - t).clamp_min(self.config.min_t) ** -2


def sample_loss(prediction: Tensor, noised: Noised, known: Tensor | None = None) -> Tensor:
    """The loss of each sample: its weight times the mean squared error over its elements; float32 [B].

    known: [B, F], 1 for latent frames that are left out of the mean; a sample with nothing else has the loss 0.
    """
    errors = (prediction.float() - noised.target).square()
    if known is None:
        return noised.weight * errors.flatten(1).mean(1)
    counted = 1.0 - known.to(errors)
    of_frames = errors.mean(dim=(1, 3, 4))
    return noised.weight * (of_frames * counted).sum(1) / counted.sum(1).clamp_min(1.0)


def micro_batch_loss(
    prediction: Tensor, noised: Noised, weights: Tensor, batch_size: int, known: Tensor | None = None
) -> Tensor:
    """The loss of a micro-batch: sum over its samples of sample weight times loss, divided by the bucket's batch size.

    weights: float32 [B], the weights of `Batch`. A sample of weight 0 adds exactly 0 and gets a gradient of exactly 0,
    also when its prediction is not finite. known: as for `sample_loss`. Returns a float32 scalar.
    """
    weights = weights.to(noised.target)
    trains = _as_column(weights > 0)
    silenced = Noised(noised.x, noised.t, torch.where(trains, noised.target, 0.0), noised.weight)
    return (weights * sample_loss(torch.where(trains, prediction, 0.0), silenced, known)).sum() / batch_size


def _as_column(values: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1, 1]."""
    return values[:, None, None, None, None]
