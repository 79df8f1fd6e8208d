"""What an objective is: training examples out of latents, the loss of a sample, and the way of its solvers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor

from longtake.contracts import Draw, Noised
from longtake.diffusion.config import ObjectiveSection, Shift
from longtake.diffusion.known import PixelShape
from longtake.diffusion.solvers import Solver


class Objective(Protocol):
    """The path from data, at time 0, to noise, at `noise_time`, in the objective's own unit."""

    noise_time: float
    draws: Mapping[str, Draw]  # the random numbers that `noise` wants, by name

    def noise(
        self,
        latents: Tensor,
        draws: Mapping[str, Tensor],
        weights: Tensor | None = None,
        shape: PixelShape | None = None,
    ) -> Noised:
        """Training examples of latents [B, C, F, h, w]. weights: [B], latents of weight 0 are taken as zeros.

        shape: (T, H, W) of the bucket's pixels, for laws of time that depend on it.
        """

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        """The loss of each sample, float32 [B], of the whole prediction; 0 where nothing counts."""

    def velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """What a prediction says, in the form that guidance adds up and solvers take: float32 [B, C, F, h, w]."""

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Where the path from clean latents to noise is at time t: a float32 scalar; [B, C, F, h, w]."""

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """The times of a solver for latents (C, F, h, w): float32 [num_steps + 1] from noise to data."""

    def solver(self, name: str) -> Solver:
        """The solver of a name in the section's `SOLVERS`."""


def build_objective(section: ObjectiveSection, patch: int, quirks: frozenset[str]) -> Objective:
    """The objective of a section, for a model whose tokens are patches of so many cells on a side."""
    return resolve_name(type(section).OBJECTIVE)(section, patch, quirks)


def sample_loss(prediction: Tensor, noised: Noised) -> Tensor:
    """The loss of each sample: its weight times the mean squared error over the elements that count; float32 [B].

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
    """The loss of a micro-batch: sum over its samples of sample weight times loss, divided by the bucket's batch size.

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
