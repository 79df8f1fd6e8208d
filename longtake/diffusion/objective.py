"""What an objective is: training examples out of latents, the loss of a sample, and the way of its solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

import torch
from torch import Tensor

from longtake.contracts import Draw, Noised
from longtake.diffusion.config import ObjectiveSection, Shift
from longtake.diffusion.known import PixelShape
from longtake.diffusion.solvers import Solver
from longtake.diffusion.timesteps import shift_time
from longtake.random import Purpose


class Objective(ABC):
    """The path from data, at time 0, to noise, at `noise_time`, in the objective's own unit.

    x(t) is made of clean latents, normal noise and a time drawn for each sample. A subclass says what the path is, what
    is predicted, which times are drawn and which a solver walks.
    """

    noise_time: float
    timestep: Draw  # the number that a sample's time is made of

    def __init__(self, config: ObjectiveSection, patch_size: int, quirks: frozenset[str] = frozenset()) -> None:
        self.config, self.patch_size, self.quirks = config, patch_size, quirks

    @property
    def draws(self) -> Mapping[str, Draw]:
        """The random numbers that `noise` wants, by name: the noise, and the number for the time."""
        return {"noise": Draw(Purpose.NOISE, "normal", "latent"), "timestep": self.timestep}

    @abstractmethod
    def times(self, drawn: Tensor, latent_shape: tuple[int, ...], shape: PixelShape | None) -> Tensor:
        """Return times in training, float32 [B], for latents (C, F, h, w); drawn: [B], by the law `timestep`."""

    def time_at(self, level: float) -> float:
        """Return the time at a share of the way from data, 0, to noise, 1."""
        return level * self.noise_time

    @abstractmethod
    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x(t), float32 [B, C, F, h, w]; t: float32, of any shape that broadcasts."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the denoiser is asked for, float32 [B, C, F, h, w]; t as above."""

    @abstractmethod
    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """Return the times of a solver for latents (C, F, h, w): float32 [num_steps + 1] from noise to data."""

    def solver_grid(
        self,
        solver: Solver,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """`grid` with the ends that a solver wants. A shift is known by the time it makes of one half."""
        if solver.ends == Solver.ends:
            return self.grid(num_steps, latent_shape, shift, shape)
        half = float(self.grid(2, latent_shape, shift, shape)[1]) / self.noise_time
        steps = torch.linspace(*solver.ends, num_steps + 1, dtype=torch.float64)
        steps[-1] = 0.0
        return (self.noise_time * shift_time(steps, half / (1 - half)).clamp_max(solver.most)).float()

    def grid_from(self, grid: Tensor, share: float) -> Tensor:
        """Return the times of a solver that begins with this share of the noise: its first, and those of
        `grid` after."""
        first = torch.full((1,), share * self.noise_time, device=grid.device)
        return torch.cat([first, grid[grid < first]])

    @abstractmethod
    def solver(self, name: str, num_steps: int) -> Solver:
        """Return the solver of a name in the section's `SOLVERS`, for a grid of so many steps."""

    def share_below(self, level: float) -> float | None:
        """Return the share of training times below a share of the way to noise; None where the section has no parts
        (`within`)."""
        return None

    def weight(self, t: Tensor) -> Tensor:
        """Return the weight of a sample's loss, float32 [B]; t: [B]."""
        return torch.ones_like(t)

    def noise(
        self,
        latents: Tensor,
        draws: Mapping[str, Tensor],
        weights: Tensor | None = None,
        shape: PixelShape | None = None,
        level: float | None = None,
    ) -> Noised:
        """Training examples, float32; draws: standard normals "noise" [B, C, F, h, w], and "timestep" [B].

        shape: (T, H, W) of the bucket's pixels, for laws of time that depend on it. level: the noise of all samples, a
        share of the way from data to noise, in place of times that are drawn. Latents of weight 0 are taken as
        zeros, so that not even an infinite one reaches the network (0 times infinity would be a NaN in every gradient).
        """
        clean = latents.float()
        noise = draws["noise"].to(clean)
        if noise.shape != clean.shape:
            raise ValueError(f"draws['noise'] has shape {tuple(noise.shape)}, the latents {tuple(clean.shape)}")
        if weights is not None:
            clean = torch.where(as_column(weights.to(clean) > 0), clean, 0.0)
        if level is None:
            t = self.times(draws["timestep"].to(clean.device), tuple(clean.shape[1:]), shape)
        else:
            t = clean.new_full((len(clean),), self.time_at(level))
        column = as_column(t)
        return Noised(self.noised_at(clean, noise, column), t, self.target(clean, noise, column), self.weight(t))

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        """Return the loss of each sample, float32 [B]: the weighted mean squared error."""
        return sample_loss(prediction, noised)

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """What guidance adds up and solvers take, float32 [B, C, F, h, w]: the prediction itself."""
        return prediction.float()


def build_objective(section: ObjectiveSection, patch: int, quirks: frozenset[str]) -> Objective:
    """Return the objective of a section, for a model whose tokens are patches of so many cells on a side."""
    return resolve_name(type(section).OBJECTIVE)(section, patch, quirks)


def sample_loss(prediction: Tensor, noised: Noised) -> Tensor:
    """Return the loss of each sample: its weight times the mean squared error over the elements that count; float32
    [B].

    A sample in which nothing counts has the loss 0.
    """
    errors = (prediction.float() - noised.target).square()
    if noised.counted is None:
        return noised.weight * errors.flatten(1).mean(1)
    alike = [dim for dim in (1, 3, 4) if noised.counted.shape[dim] == 1]
    errors = errors.mean(dim=alike, keepdim=True)
    counted = noised.counted.to(errors)
    return noised.weight * (errors * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1.0)


def micro_batch_loss(
    loss: Callable[[Tensor, Noised], Tensor], prediction: Tensor, noised: Noised, weights: Tensor, batch_size: int
) -> Tensor:
    """Return the loss of a micro-batch: sum over its samples of sample weight times loss, divided by the bucket's batch
    size.

    loss: the objective's, of each sample. weights: float32 [B], the weights of `Batch`. A sample of weight 0 adds
    exactly 0 and gets a gradient of exactly 0, also when its prediction is not finite. Returns a float32 scalar.
    """
    weights = weights.to(noised.target)
    trains = as_column(weights > 0)
    silenced = Noised(noised.x, noised.t, torch.where(trains, noised.target, 0.0), noised.weight, noised.counted)
    return (weights * loss(torch.where(trains, prediction, 0.0), silenced)).sum() / batch_size


def as_column(values: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1, 1]."""
    return values[:, None, None, None, None]
