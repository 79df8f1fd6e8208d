"""Solvers: from noise at t = 1 along the velocity to a clean sample at t = 0, in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

# denoise(x, t, step) -> velocity: x [B, C, F, h, w] float32, t [B] float32, step counted from 0 (guidance schedules
# depend on it; a solver of higher order calls more than once for the same step).
Denoise = Callable[[Tensor, Tensor, int], Tensor]
# on_step(steps done, number of steps, x): called after each step, for progress and previews.
OnStep = Callable[[int, int, Tensor], None]


class Solver(ABC):
    """Walks a time grid. A solver is its `step`; the loop is the same for all."""

    @abstractmethod
    def step(self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int) -> Tensor:
        """One step of x [B, C, F, h, w] from time t to t_next (float32 scalars); float32 in and out."""

    @torch.no_grad()
    def sample(self, denoise: Denoise, x: Tensor, grid: Tensor, on_step: OnStep | None = None) -> Tensor:
        """Takes x [B, C, F, h, w] from time grid[0] to grid[-1]; returns float32 of the same shape.

        grid: float32 [steps + 1], as `RectifiedFlow.grid` makes it.
        """
        x, grid = x.float(), grid.to(x.device, torch.float32)
        num_steps = len(grid) - 1
        for index in range(num_steps):
            x = self.step(denoise, x, grid[index], grid[index + 1], index)
            if on_step is not None:
                on_step(index + 1, num_steps, x)
        return x


class Euler(Solver):
    """The first-order rule x + (t_next - t) v, one call of the network in a step."""

    def step(self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int) -> Tensor:
        velocity = denoise(x, t.expand(len(x)), index)
        return x + (t_next - t) * velocity.float()
