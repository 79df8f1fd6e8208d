"""Frozen weights quantized to int8, fp8 or nf4, as plain tensors.

Each row of a weight [out, in] is quantized by itself, so FSDP's shards, which are cuts of rows, are too, and codes and
scales are ordinary tensors to meshes and checkpoints. torchao's tensor subclasses are neither, which is why this is
written out; its int8 and nf4 are what the tests compare with.

| kind | codes                 | scale                              | bits a weight    |
|------|-----------------------|------------------------------------|------------------|
| int8 | int8 [out, in]        | [out], largest of the row / 127    | 8 + 16 / in      |
| fp8  | uint8 [out, in], e4m3 | [out], largest of the row / 448    | 8 + 16 / in      |
| nf4  | uint8 [out, in / 2]   | [out, in / 64], largest of 64      | 4.25             |

nf4: 16 quantiles of a normal distribution (Dettmers et al., QLoRA, 2023), two codes a byte, the first in the high bits.
Codes are never floating point: FSDP casts whatever is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.contracts import UserError

Kind = Literal["int8", "fp8", "nf4"]

_BLOCK = 64  # weights that share a scale in nf4
_LARGEST = {"int8": 127.0, "fp8": 448.0}
# Quantiles of N(0, 1) over their largest, 8 below zero, zero, 7 above: appendix E of the QLoRA paper.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def empty(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and scales for a weight like this one, still without values; scales are of its dtype."""
    rows, columns = weight.shape
    codes, scales = ((rows, columns // 2), (rows, columns // _BLOCK)) if kind == "nf4" else ((rows, columns), (rows,))
    return weight.new_empty(codes, dtype=torch.int8 if kind == "int8" else torch.uint8), weight.new_empty(scales)


def check_width(kind: Kind, name: str, columns: int) -> None:
    """Raise `UserError` where a layer's inputs do not make whole blocks."""
    if kind == "nf4" and columns % _BLOCK:
        raise UserError(
            f'lora.base = "nf4": the {columns} inputs of {name} do not divide by {_BLOCK}; choose "int8" or "fp8"'
        )


def quantize(weight: Tensor, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales (of `dtype`) of a weight [out, in]. Codes fit the scale as it is after rounding to `dtype`."""
    weight = weight.float()
    if kind == "nf4":
        blocks = weight.unflatten(1, (-1, _BLOCK))
        scale = _nonzero(blocks.abs().amax(-1).to(dtype))
        bounds = _nf4(weight.device, torch.float32)
        codes = torch.bucketize(blocks / scale.float()[..., None], (bounds[1:] + bounds[:-1]) / 2, out_int32=True)
        pairs = codes.flatten(1).to(torch.uint8).unflatten(1, (-1, 2))
        return pairs[..., 0] << 4 | pairs[..., 1], scale
    largest = _LARGEST[kind]
    scale = _nonzero((weight.abs().amax(1) / largest).to(dtype))
    scaled = (weight / scale.float()[:, None]).clamp_(-largest, largest)
    if kind == "int8":
        return scaled.round_().to(torch.int8), scale
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`."""
    scale = scale.to(dtype)
    if kind == "nf4":
        codes = codes.to(torch.int32)
        pairs = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
        return (_nf4(codes.device, dtype)[pairs].unflatten(1, (-1, _BLOCK)) * scale[..., None]).flatten(1)
    values = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return values.to(dtype) * scale[:, None]


def linear(x: Tensor, codes: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """Return x W^T in x's dtype; W is dequantized where it is needed, and again in backward: only its codes are
    saved."""
    return _Product.apply(x, codes, scale, kind)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.kind = kind
        return F.linear(x, dequantize(codes, scale, kind, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        return grad @ dequantize(codes, scale, ctx.kind, grad.dtype), None, None, None


def _nonzero(scale: Tensor) -> Tensor:
    """Rows of zeros get scale 1, so that they stay zeros."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


@lru_cache(maxsize=16)
def _nf4(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the NF4 levels, filled on the device: a table from the host would be copied, and waited for, in each call
    of a compiled block."""
    return torch.stack([torch.full((), level, dtype=dtype, device=device) for level in _NF4])
