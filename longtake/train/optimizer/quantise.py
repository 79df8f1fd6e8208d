"""Optimizer moments in one byte each: block-wise dynamic quantisation, in plain tensor operations.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022, arXiv 2110.02861): up to 256 numbers
share a float32 scale, the largest magnitude among them, and each is the nearest of 256 levels times that scale. Levels
lie close together near zero, like floating point numbers: seven decades, of which a higher one has twice as many.

Two things differ from the paper. A block never leaves its row (dim 0 of the tensor), so blocks and scales are the same
however rows are sharded, and moments move to another mesh without loss. And the lowest level of the second
moment is 1e-7 instead of 0 (that zero does harm: Li et al., "Memory Efficient Optimizers with 4-bit States", NeurIPS
2023): an element whose gradient is far below its neighbours' would else be divided by the bare epsilon.

torchao's 8-bit AdamW is not used: it reads no tensor that says on the device that a step is left out, its rounding of
bf16 weights draws from PyTorch's generator, and its blocks depend on how a tensor is cut.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from longtake.transfer import to_device

MOST_IN_BLOCK = 256
LEAST_IN_BLOCK = 32
LEAST_NUMBERS = 4096  # smaller tensors stay float32: they weigh nothing and many of them are norms
_DECADES = 7
_LOWEST_SQUARE = 1e-7
_SMALLEST = torch.finfo(torch.float32).tiny

# float32 [256]: the levels in ascending order; float32 [256]: the 255 borders between them, then infinity;
# int32 [65536]: how many borders lie below all numbers with these upper 16 bits
Table = tuple[Tensor, Tensor, Tensor]


def block_size(shape: tuple[int, ...]) -> int | None:
    """Return the number of neighbours in a row of a whole tensor that share a scale: the largest divisor of its length
    up to 256.

    None where the tensor is to stay float32: vectors, small ones, and rows whose length has no divisor of 32 to 256.
    """
    if len(shape) < 2 or prod(shape) < LEAST_NUMBERS:
        return None
    row = prod(shape[1:])
    block = next(size for size in range(min(MOST_IN_BLOCK, row), 0, -1) if row % size == 0)
    return block if block >= LEAST_IN_BLOCK else None


def scale_shape(shape: tuple[int, ...], block: int) -> tuple[int, int]:
    """Shape of the scales of a tensor, or of a shard of its rows."""
    return shape[0], prod(shape[1:]) // block


@lru_cache(maxsize=16)
def table(signed: bool, device: torch.device) -> Table:
    """Levels, borders and where to start on a device: -0.993 ... 1 for the first moment, 1e-7 ... 1 for the second."""
    found = [0.0 if signed else _LOWEST_SQUARE, 1.0]
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        found += middles + [-middle for middle in middles] * signed
    levels = torch.tensor(sorted(found), dtype=torch.float64)
    borders = ((levels[1:] + levels[:-1]) / 2).float()
    padded = torch.cat([borders, torch.tensor([torch.inf])])
    return to_device(levels.float(), device), to_device(padded, device), to_device(_starts(borders), device)


def _starts(borders: Tensor) -> Tensor:
    """For every pattern of a float32's upper 16 bits: how many borders lie below all numbers that begin so.

    Numbers that begin alike share sign, exponent and 7 bits of the mantissa. Levels lie too far apart for two borders
    between any of them, so one comparison decides the rest.
    """
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    negative = patterns >> 15
    lowest, highest = (patterns << 16) | (negative * 0xFFFF), (patterns << 16) | ((1 - negative) * 0xFFFF)
    starts, ends = (torch.bucketize(bits.view(torch.float32), borders, out_int32=True) for bits in (lowest, highest))
    assert int((ends - starts).max()) == 1, "two borders between numbers with equal upper bits"
    return starts


def quantise(values: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """float32 [blocks, n] -> codes uint8 [blocks, n] and scales float32 [blocks].

    The code is the number of borders below a value, as `torch.bucketize` finds it: two look-ups for its eight.
    """
    _, borders, starts = table
    scales = values.abs().amax(1)
    relative = (values / scales.clamp(min=_SMALLEST)[:, None]).view(-1)
    start = starts.index_select(0, (relative.view(torch.int32) >> 16) & 0xFFFF)
    return (start + (relative > borders.index_select(0, start))).to(torch.uint8).view_as(values), scales


def dequantise(codes: Tensor, scales: Tensor, table: Table) -> Tensor:
    """Codes [blocks, n] and scales [blocks] -> float32 [blocks, n]."""
    return table[0].index_select(0, codes.int().view(-1)).view(codes.shape) * scales[:, None]
