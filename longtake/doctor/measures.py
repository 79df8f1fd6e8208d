"""The mathematics of the checks: what a prediction says of the clean latents, whatever is predicted, and how good it is
beside a guess that knows no more than the latents' mean and spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from longtake.contracts import Draw
from longtake.diffusion.objective import Objective

_LEAST = 1e-3  # of the divisor that turns a prediction into clean latents


@dataclass(frozen=True)
class Line:
    """x = signal clean + noise_level noise, and target = of_clean clean + of_noise noise, at one time."""

    signal: float
    noise_level: float
    of_clean: float
    of_noise: float

    @classmethod
    def at(cls, objective: Objective, t: float) -> Line:
        """Those of an objective, whose path and target are linear in both."""
        one, none = torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 1)
        pairs, time = ((one, none), (none, one)), torch.full_like(one, t)
        path = [float(objective.noised_at(*pair, time)) for pair in pairs]
        return cls(*path, *(float(objective.target(*pair, time)) for pair in pairs))

    def predictions(self) -> Mapping[str, Line]:
        """What a network may predict beside the target, by name."""
        a, b = self.signal, self.noise_level
        kinds = {
            "the clean latents": (1.0, 0.0),
            "the noise": (0.0, 1.0),
            "noise - clean (the velocity of a flow)": (-1.0, 1.0),
            "clean - noise (the velocity of a flow, from noise to data)": (1.0, -1.0),
            "v of a diffusion": (-b, a),
        }
        return {name: Line(a, b, *of) for name, of in kinds.items() if not self.predicts(*of)}

    def predicts(self, of_clean: float, of_noise: float) -> bool:
        return abs(self.of_clean - of_clean) + abs(self.of_noise - of_noise) < 0.05

    def clean(self, prediction: Tensor, x: Tensor) -> Tensor:
        """Return the clean latents that a prediction stands for."""
        divisor = self.of_clean * self.noise_level - self.of_noise * self.signal
        divisor = max(abs(divisor), _LEAST) * (1 if divisor >= 0 else -1)
        return (self.noise_level * prediction.float() - self.of_noise * x) / divisor

    def guess(self, clean: Tensor, x: Tensor) -> Tensor:
        """Return the best linear guess of the clean latents from x, one number at a time: each channel's mean and
        variance are all that it knows (Wiener's filter)."""
        variance, mean = torch.var_mean(clean, dim=(0, 2, 3, 4), keepdim=True)
        gain = self.signal * variance / (self.signal**2 * variance + self.noise_level**2).clamp_min(1e-12)
        return mean + gain * (x - self.signal * mean)


def quantile(draw: Draw, share: float) -> float:
    """Return the number below which a share of those drawn lie."""
    if draw.law == "normal":
        return NormalDist().inv_cdf(share)
    return share if draw.law == "uniform" else float(int(share * draw.below))


def errors(found: Tensor, true: Tensor) -> Tensor:
    """Return the mean squared error of each sample, float32 [B]."""
    return (found.float() - true.float()).square().flatten(1).mean(1)


def psnr(found: Tensor, true: Tensor) -> Tensor:
    """dB of each clip, [B], of pixels in [-1, 1]; at most 100."""
    return 10 * torch.log10(4 / errors(found, true).clamp_min(4e-10))


def change(one: Tensor, other: Tensor) -> float:
    """How far two predictions are apart, as a share of their size."""
    return float((one.float() - other.float()).norm() / one.float().norm().clamp_min(1e-12))


def in_one_cell(t: float, scale: float) -> tuple[float, float, float]:
    """Three times near `t`, as far from one another: the first two become one when they, multiplied by `scale`, are
    rounded to bfloat16, the third does not."""
    middle = float(torch.tensor(t * scale).bfloat16())
    width = float(torch.tensor(middle).bfloat16().nextafter(torch.tensor(torch.inf).bfloat16())) - middle
    return (middle - 0.2 * width) / scale, (middle + 0.2 * width) / scale, (middle + 0.6 * width) / scale
