"""The loss of clips at fixed noise levels with fixed noise: a measure that moves with the weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longtake.contracts import Batch, Conditions
from longtake.random import Purpose, normals
from longtake.system.build import System
from longtake.system.examples import clean_example

_LEVEL_UNIT = 10**6  # levels are told apart to this part of the way from data to noise


@torch.no_grad()
def level_losses(
    system: System,
    batch: Batch,
    nothing: Conditions,
    levels: Sequence[float],
    leave_out_known: bool = False,
) -> Tensor:
    """Return the objective's loss of each sample of a batch at each noise level: float32 [levels, B], on the device.

    levels: shares of the way from data, 0, to noise, 1. The noise is a function of a sample's key and the level alone.
    nothing as for `clean_example`, leave_out_known as for its `noised`; captions are never dropped. Samples
    of weight 0 have the loss 0. Collective where the denoiser is sharded or has peers.
    """
    weights = batch.weights.to(system.device)
    clean = clean_example(system, batch, nothing, weights)
    found = []
    for level in levels:
        noise = _noise(batch, level, clean.latents.shape).to(system.device)
        noisy = replace(clean, draws={**clean.draws, "noise": noise})
        noised, conditions = noisy.noised(system, leave_out_known, level)
        losses = system.objective.loss(system.at(noised.t).denoiser(noised.x, noised.t, conditions), noised)
        found.append(torch.where(weights > 0, losses, 0.0))
    return torch.stack(found)


def _noise(batch: Batch, level: float, shape: Sequence[int]) -> Tensor:
    """Return standard normals [B, C, F, h, w], on the CPU."""
    numbers = normals(0, 0, Purpose.VALIDATION, round(level * _LEVEL_UNIT), batch.keys, shape[1:].numel())
    return torch.from_numpy(numbers).reshape(shape)
