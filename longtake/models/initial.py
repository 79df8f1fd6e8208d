"""Initial parameter values: pure functions of (seed, parameter name), the same on every mesh (DESIGN §4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from longtake import random


class HasInitialValues(Protocol):
    """A model that knows how each of its parameters starts."""

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor: ...


@runtime_checkable
class HoldsCodes(Protocol):
    """A layer that may hold the weight [out_features, in_features] as several parameters."""

    in_features: int
    out_features: int

    def held_as(self, kind: str, dense: Tensor) -> dict[str, Tensor]: ...


def linear_uniform(name: str, shape: Sequence[int], fan_in: int, seed: int) -> Tensor:
    """Uniform in [-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's law for `nn.Linear` weights and biases: fp32, CPU."""
    bound = fan_in**-0.5
    values = torch.from_numpy(random.parameter_uniforms(seed, name, math.prod(shape)))
    return values.mul_(2 * bound).sub_(bound).view(*shape)


def initial_values(model: nn.Module, name: str, seed: int) -> dict[str, Tensor]:
    """What the parameter `name` starts with, whole, float32 on the CPU: a pure function of (seed, name).

    A weight that is held as codes gives these and their scales; scales give nothing of their own. Layers with
    parameters that the model does not know (adapters) tell themselves how these start.
    """
    layer, kind = _layer_of(model, name)
    if isinstance(layer, HoldsCodes):
        if kind == "weight_scale":
            return {}
        if kind not in ("weight", "bias"):
            return {name: layer.initial_value(name, seed)}
        shape = (layer.out_features, layer.in_features) if kind == "weight" else (layer.out_features,)
        return held_as(model, name, model.initial_value(name, shape, seed))
    return {name: model.initial_value(name, tuple(layer.get_parameter(kind).shape), seed)}


def held_as(model: nn.Module, name: str, dense: Tensor) -> dict[str, Tensor]:
    """The parameters, by name, that hold a dense value of the parameter `name`."""
    layer, kind = _layer_of(model, name)
    if not isinstance(layer, HoldsCodes):
        return {name: dense}
    prefix = name.removesuffix(kind)
    return {prefix + part: value for part, value in layer.held_as(kind, dense).items()}


def _layer_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    layer, _, kind = name.rpartition(".")
    return model.get_submodule(layer), kind


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a model on one device with its initial value for `seed`, cast to the parameter's dtype.

    The values do not depend on the order of the parameters, on what else is in the model, or on any global generator.
    """
    parameters = dict(model.named_parameters())
    for name in parameters:
        for part, value in initial_values(model, name, seed).items():
            parameters[part].copy_(value)
