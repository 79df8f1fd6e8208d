"""Initial parameter values: pure functions of (seed, parameter name), the same on every mesh.

They are made on PyTorch's default device: by NumPy on several threads for a CPU, by the device itself elsewhere
(`benchmarks/initialise.py`). The bits are the same: integers, and products and differences that IEEE rounds alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longtake import random

_MASK = 0xFFFFFFFF
_BLOCKS_AT_ONCE = 1 << 21  # of four numbers, in int64: 16 MiB for each of a dozen temporary tensors


def linear_uniform(name: str, shape: Sequence[int], fan_in: float, seed: int) -> Tensor:
    """Uniform in [-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's law for `nn.Linear` weights and biases: fp32, on the
    default device."""
    bound, count = fan_in**-0.5, math.prod(shape)
    if (device := torch.get_default_device()).type == "cpu":
        values = torch.from_numpy(random.parameter_uniforms(seed, name, count))
    else:
        values = uniforms_on(device, seed, name, count)
    return values.mul_(2 * bound).sub_(bound).view(*shape)


def normal(name: str, shape: Sequence[int], std: float, seed: int) -> Tensor:
    """Return normal numbers of standard deviation `std`: fp32, on the default device. NumPy makes them, so keep it
    to small parameters."""
    values = torch.from_numpy(random.parameter_normals(seed, name, math.prod(shape)))
    return values.mul_(std).view(*shape).to(torch.get_default_device())


def uniforms_on(device: torch.device, seed: int, name: str, count: int) -> Tensor:
    """`random.parameter_uniforms`, the same bits, computed on `device`: float32 [count]."""
    keys = random.stream_key(seed, 0, random.Purpose.WEIGHTS)
    sample, num_blocks = random.hash64(name), -(-count // 4)
    out = torch.empty(num_blocks, 4, dtype=torch.float32, device=device)
    for start in range(0, num_blocks, _BLOCKS_AT_ONCE):
        rows = out[start : start + _BLOCKS_AT_ONCE]
        block = torch.arange(start, start + len(rows), dtype=torch.int64, device=device)
        for column, word in enumerate(_philox((block, 0, sample & _MASK, sample >> 32), keys)):
            rows[:, column] = (word >> 8).to(torch.float32) * 2.0**-24
    return out.view(-1)[:count]


def _philox(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """`random.philox4x32` in PyTorch's int64: products wrap as unsigned ones do, shifts need their sign cut off."""
    (m0, m1), (step0, step1) = random.PHILOX_MULTIPLIERS, random.PHILOX_KEY_STEPS
    c0, c1, c2, c3 = (torch.as_tensor(c, device=counter[0].device) for c in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + step0) & _MASK, (k1 + step1) & _MASK
    return c0, c1, c2, c3


def initial_values(model: nn.Module, name: str, seed: int) -> dict[str, Tensor]:
    """Return the initial values of the parameter `name`, whole, float32 on the default device: a pure function of
    (seed, name).

    A weight that is held as codes gives these and their scales; scales give nothing of their own. Layers with
    parameters that the model does not know (adapters) have an `initial_value` of their own.
    """
    layer, kind = _layer_of(model, name)
    if hasattr(layer, "held_as"):  # `FrozenLinear`, whose module imports this one
        if kind == "weight_scale":
            return {}
        if kind not in ("weight", "bias"):
            return {name: layer.initial_value(name, seed)}
        shape = (layer.out_features, layer.in_features) if kind == "weight" else (layer.out_features,)
        return held_as(model, name, model.initial_value(name, shape, seed))
    return {name: model.initial_value(name, tuple(layer.get_parameter(kind).shape), seed)}


def held_as(model: nn.Module, name: str, dense: Tensor) -> dict[str, Tensor]:
    """Return the parameters, by name, that hold a dense value of the parameter `name`."""
    layer, kind = _layer_of(model, name)
    if not hasattr(layer, "held_as"):
        return {name: dense}
    prefix = name.removesuffix(kind)
    return {prefix + part: value for part, value in layer.held_as(kind, dense).items()}


def _layer_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    layer, _, kind = name.rpartition(".")
    return model.get_submodule(layer), kind
