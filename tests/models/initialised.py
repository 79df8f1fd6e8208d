"""Models on one device with their initial values."""

from __future__ import annotations

import torch
from torch import nn

from longtake.models.initial import initial_values


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fills every parameter of a model on one device with its initial value for `seed`, in the parameter's dtype."""
    parameters = dict(model.named_parameters())
    for name in parameters:
        for part, value in initial_values(model, name, seed).items():
            parameters[part].copy_(value)
