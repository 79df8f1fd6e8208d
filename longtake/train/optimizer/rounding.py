"""Stochastic rounding to bfloat16, from bits that are a pure function of (seed, parameter, element, update).

An update far below a weight's last bit would be lost to rounding to nearest, every time. Rounded up with the
probability given by the remainder, it is kept on average (Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015). The bits are an integer hash of an element's place in the whole tensor, made where the
weights are: on every mesh, and after a restart, the same; a generator would have a state and know only its own shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtake.random import Purpose, hash64, stream_key

_FACTORS = 0x7FEB352D, 0x846CA68B - (1 << 32)  # the second as a signed number


def rounding_key(seed: int, name: str, start: int, device: torch.device) -> Tensor:
    """Return the key of the random bits of one shard of a parameter: int32 [3].

    `start`: place of the shard's first element in the whole tensor, rows side by side.
    """
    word = hash64(*stream_key(seed, 0, Purpose.ROUNDING), name)
    return torch.tensor([_signed(word), _signed(word >> 32), _signed(start)], dtype=torch.int32, device=device)


def random_bits(key: Tensor, update: Tensor, count: int) -> Tensor:
    """Bits of the first `count` elements of a shard at the update of this number (0-d): int32 [count]."""
    start = _mixed(update.to(torch.int32) + key[0])
    places = torch.arange(count, dtype=torch.int32, device=key.device) + key[2]
    return _mixed(_mixed(places + start) ^ _mixed(start ^ key[1]))


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up or down in magnitude; `bits`: int32 of the same shape, of which the lower 16 count."""
    return ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of 32 bits that is one to one: "lowbias32" of C. Wellons's Hash Prospector. int32;
    products wrap."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FACTORS[0]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _FACTORS[1]
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    """Return the lower 32 bits of a number as int32 has them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
