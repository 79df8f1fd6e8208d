"""Solvers: from noise at t = 1 along the velocity to a clean sample at t = 0, in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

# denoise(x, t, step) -> velocity: x [B, C, F, h, w] float32, t [B] float32, step counted from 0 (guidance schedules
# depend on it; a solver of higher order calls more than once for the same step).
Denoise = Callable[[Tensor, Tensor, int], Tensor]
# on_step(steps done, number of steps, x): called after each step, for progress and previews.
OnStep = Callable[[int, int, Tensor], None]
Scale = float | Tensor  # of a branch of guidance: one number, or one for each latent frame, float32 [F]
# What a solver remembers of the sample under way: branch of guidance -> (time, velocity) when it was last computed; the
# velocity is NaN where x has since been set to another value than the steps led to.
Past = dict[str, tuple[Tensor, Tensor]]
Hold = Callable[[Tensor, Tensor], Tensor]  # hold(x, t) -> x with what is known of it at time t
# noise(index of a step) -> standard normal numbers [B, C, F, h, w]: each video's own, by its seed.
StepNoise = Callable[[int], Tensor]


@runtime_checkable
class Branched(Protocol):
    """A denoiser whose velocity is a sum of branches; calling it gives the sum."""

    def branches(self, x: Tensor, t: Tensor, step: int) -> Mapping[str, tuple[Scale, Tensor]]:
        """Name -> (scale, velocity [B, C, F, h, w] float32) of the branches that this step needs."""


class Solver(ABC):
    """Walks a time grid. A solver is its `step`; the loop is the same for all.

    `ends`: between which shares of the way to noise its steps are equal before the shift; its last time is 0 in any
    case. `most`: its first share after the shift, at most.
    """

    ends: ClassVar[tuple[float, float]] = (1.0, 0.0)
    most: ClassVar[float] = 1.0

    @abstractmethod
    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        """One step of x [B, C, F, h, w] from time t to t_next (float32 scalars); float32 in and out.

        past: empty at the first step of a sample; the solver may write into it. noise: for a solver that adds some.
        """

    @torch.no_grad()
    def sample(
        self,
        denoise: Denoise,
        x: Tensor,
        grid: Tensor,
        on_step: OnStep | None = None,
        noise: StepNoise | None = None,
        hold: Hold | None = None,
    ) -> Tensor:
        """Take x [B, C, F, h, w] from time grid[0] to grid[-1]; return float32 of the same shape.

        grid: float32 [steps + 1], as the objective makes it. hold: what is done to x before each step, and at the end.
        """
        x, grid = x.float(), grid.to(x.device, torch.float32)
        num_steps = len(grid) - 1
        past: Past = {}
        for index in range(num_steps):
            if hold is not None:
                led_to, x = x, hold(x, grid[index])
                past.update((name, (t, v.masked_fill(x != led_to, torch.nan))) for name, (t, v) in past.items())
            x = self.step(denoise, x, grid[index], grid[index + 1], index, past, noise or _no_noise)
            if on_step is not None:
                on_step(index + 1, num_steps, x)
        return x if hold is None else hold(x, grid[-1])


def _no_noise(index: int) -> Tensor:
    raise ValueError(f"step {index}: this solver adds noise, and was given none")


class Euler(Solver):
    """The first-order rule x + (t_next - t) v, one call of the network in a step."""

    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        velocity = denoise(x, t.expand(len(x)), index)
        return x + (t_next - t) * velocity.float()


class AdamsBashforth2(Solver):
    """The two-step Adams-Bashforth rule on an uneven grid: second order at one call of the network in a step.

    The velocity is continued in a straight line through the last two: x + h (v + h / 2 (v - v_before) / (t - t_before))
    with h = t_next - t; the first step is Euler's (Hairer, Norsett, Wanner, "Solving Ordinary Differential Equations
    I", III.5).

    Branches of guidance are continued each by itself, before they are scaled and added up: where the scales change from
    step to step (oscillating guidance, frame scales), the line through two sums would take the change of scale for a
    change of the velocity. A branch that a step left out is continued from where it was last computed. Where a known
    place has just been released, the velocity before was that of another path, and the step is Euler's.

    The line overshoots where the velocity bends within a step: at ten steps, or under strong guidance of a small model,
    Euler can be the better of the two (`benchmarks/results/solver.json`).
    """

    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        times = t.expand(len(x))
        if isinstance(denoise, Branched):
            parts = denoise.branches(x, times, index)
        else:
            parts = {"": (1.0, denoise(x, times, index).float())}
        total = torch.zeros_like(x)
        for name, (scale, velocity) in parts.items():
            mean = velocity
            if name in past:
                t_before, before = past[name]
                change = torch.where(before.isnan(), 0.0, velocity - before)
                mean = velocity + (t_next - t) / 2 / (t - t_before) * change
            past[name] = t, velocity
            total += over_frames(scale, mean) * mean
        return x + (t_next - t) * total


def over_frames(scale: Scale, like: Tensor) -> Scale:
    """Return a scale that multiplies `like` [B, C, F, h, w]: [F] -> [F, 1, 1] on its device."""
    return scale.to(like)[:, None, None] if isinstance(scale, Tensor) else scale
