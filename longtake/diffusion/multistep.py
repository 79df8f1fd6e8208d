"""Multistep solvers of flows that estimate the data: DPM-Solver++ 2M and UniPC, at one call of the network per step.

With s the share of noise, the velocity v gives the estimate m = x - s v. In the half logarithm of the signal-to-noise
ratio, lambda = log((1 - s) / s), a step from s to t with h = lambda_t - lambda_s and E = exp(-h) - 1 is

    x_t = t / s x_s - (1 - t) E (m_s + D / 2),    D = (m_before - m_s) / r,    r = (lambda_before - lambda_s) / h

without D at the first step and at the last one (Lu et al., "DPM-Solver++", 2022). UniPC is this step followed by a
correction once the next estimate is known (Zhao et al., "UniPC", 2023; order 2, B(h) = exp(-h) - 1). As in Wan's own
code, the network gets times cut to whole thousandths of the way to noise.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from longtake.diffusion.solvers import AdamsBashforth2, Denoise, Euler, Past, Solver, StepNoise

_TIMES = 1000  # that the network is given
_DATA, _BEFORE, _SAMPLE = "data", "data before", "sample"  # what a walk remembers


class FlowDPM2M(Solver):
    """DPM-Solver++ 2M, on a path x(t) = m + t v with times up to `noise_time`."""

    def __init__(self, noise_time: float) -> None:
        self.noise_time = noise_time

    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        told = (t * (_TIMES / self.noise_time)).floor() * (self.noise_time / _TIMES)
        data = x - t * denoise(x, told.expand(len(x)), index).float()
        x = self._corrected(x, data, t, past)
        if _DATA in past:
            past[_BEFORE] = past[_DATA]
        past[_DATA], past[_SAMPLE] = (t, data), (t, x)
        ratio, factor, _ = self._coefficients(t, t_next)
        return ratio * x - factor * (data + self._difference(t, t_next, past) / 2)

    def _corrected(self, x: Tensor, data: Tensor, t: Tensor, past: Past) -> Tensor:
        """x with what `data`, the estimate at x, says about the step that led there."""
        return x

    def _difference(self, t: Tensor, t_next: Tensor, past: Past) -> Tensor:
        """D of a step from t: 0 where there is no estimate before, and at both ends of the path."""
        _, data = past[_DATA]
        if _BEFORE not in past:
            return torch.zeros_like(data)
        before, data_before = past[_BEFORE]
        change = (data_before - data) / self._distance_ratio(before, t, t_next)
        return torch.where(change.isfinite(), change, 0.0)

    def _distance_ratio(self, before: Tensor, t: Tensor, t_next: Tensor) -> Tensor:
        """r, a float64 scalar."""
        level, level_before, level_next = (self._level(time) for time in (t, before, t_next))
        return (level_before - level) / (level_next - level)

    def _coefficients(self, t: Tensor, t_next: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """t / s, (1 - t) E and h of a step, float64 scalars."""
        distance = self._level(t_next) - self._level(t)
        signal = 1 - t_next.double() / self.noise_time
        return t_next.double() / t.double(), signal * torch.expm1(-distance), distance

    def _level(self, t: Tensor) -> Tensor:
        """lambda, a float64 scalar; minus infinity at noise, infinity at data."""
        share = t.double() / self.noise_time
        return torch.log1p(-share) - share.log()


class UniPC(FlowDPM2M):
    """UniPC of order 2, on the times of Wan's own code, which begin at .999 of the way to noise before the shift."""

    ends: ClassVar[tuple[float, float]] = (0.999, 0.0)

    def _corrected(self, x: Tensor, data: Tensor, t: Tensor, past: Past) -> Tensor:
        if _SAMPLE not in past:
            return x
        (start, sample), (_, data_start) = past[_SAMPLE], past[_DATA]
        ratio, factor, h = self._coefficients(start, t)
        first = torch.expm1(-h) / -h - 1
        b1 = first / torch.expm1(-h)
        b2 = 2 * (first / -h - 0.5) / torch.expm1(-h)
        if _BEFORE in past:
            r = self._distance_ratio(past[_BEFORE][0], start, t)
            weight_before = (b2 - b1) / (r - 1)
            weight = b1 - weight_before
            change = weight_before * self._difference(start, t, past) + weight * (data - data_start)
        else:
            change = 0.5 * (data - data_start)
        corrected = ratio * sample - factor * (data_start + change)
        return torch.where(corrected.isfinite(), corrected, x)  # not where x was set to known values since


class DiffusersUniPC(UniPC):
    """The same on the times of diffusers' UniPCMultistepScheduler, which end before the last step at .001."""

    ends: ClassVar[tuple[float, float]] = (1.0, 0.001)
    most: ClassVar[float] = 1 - 1e-6


def flow_solver(name: str, noise_time: float) -> Solver:
    """Return a solver of `config.FLOW_SOLVERS`, for times up to `noise_time`."""
    if name in ("euler", "ab2"):
        return {"euler": Euler, "ab2": AdamsBashforth2}[name]()
    return {"unipc": UniPC, "unipc_diffusers": DiffusersUniPC, "dpmpp_2m": FlowDPM2M}[name](noise_time)
