"""Initial parameter values: pure functions of (seed, parameter name), the same on every mesh (DESIGN §4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from longtake import random


class HasInitialValues(Protocol):
    """A model that knows how each of its parameters starts."""

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor: ...


def linear_uniform(name: str, shape: Sequence[int], fan_in: int, seed: int) -> Tensor:
    """Uniform in [-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's law for `nn.Linear` weights and biases: fp32, CPU."""
    bound = fan_in**-0.5
    values = torch.from_numpy(random.parameter_uniforms(seed, name, math.prod(shape)))
    return values.mul_(2 * bound).sub_(bound).view(*shape)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a model on one device with its initial value for `seed`, cast to the parameter's dtype.

    The values do not depend on the order of the parameters, on what else is in the model, or on any global generator.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(model.initial_value(name, parameter.shape, seed))
