"""The update of AdamW (Loshchilov & Hutter, ICLR 2019) on one shard, for what PyTorch's fused kernel does not know:
moments in a byte, and weights in bfloat16.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = (1 - lr decay) w - lr / (1 - b1^n) * m / (sqrt(v) / sqrt(1 - b2^n) + eps)

All of it in float32, with nothing read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longtake.train.optimizer.quantise import Table, dequantise, quantise
from longtake.train.optimizer.rounding import random_bits, round_stochastically

Moments = Mapping[str, Tensor]
Numbers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class StepNumbers:
    """Scalars that all parameters of one update share: 0-d tensors on their device."""

    lr_value: float
    lr: Tensor
    rate: Tensor  # lr over the bias correction of the first moment
    root: Tensor  # of the bias correction of the second
    count: Tensor  # of updates with this one, float32
    skip: Tensor  # bool: nothing is to change
    scale: Tensor | None  # of the gradient

    @classmethod
    def of(
        cls, lr: float, betas: tuple[float, float], updates: Tensor, scale: Tensor | None, skip: Tensor | None
    ) -> StepNumbers:
        """Return the numbers of the update after `updates`; on its device, which is the CPU where masters are kept
        there."""
        device, count = updates.device, updates + 1
        exact = count.double()  # 1 - b^n cancels
        return cls(
            lr_value=lr,
            lr=torch.full((), lr, device=device),
            rate=(lr / (1 - betas[0] ** exact)).float(),
            root=(1 - betas[1] ** exact).sqrt().float(),
            count=count,
            skip=torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip.to(device).bool(),
            scale=None if scale is None else scale.to(device),
        )

    def tensors(self) -> Numbers:
        """Rate, root, count, skip and scale (1 where there is none), as the kernels take them."""
        scale = torch.ones_like(self.lr) if self.scale is None else self.scale
        return self.rate, self.root, self.count, self.skip, scale


def update_fp32(
    weights: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    key: Tensor,
    lasting: Tensor,
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update weights [n] (float32 or bfloat16) and their moments (float32 [n]) in place.

    `grad`: of any dtype; `key`: of `rounding_key`; `lasting`: lr x decay, 0-d.
    """
    new, m, v = _adamw(weights, grad, first, second, lasting, numbers, betas, eps)
    skip = numbers[3]
    _keep_weights(weights, new, key, numbers)
    first.copy_(torch.where(skip, first, m))
    second.copy_(torch.where(skip, second, v))


def update_8bit(
    weights: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    first_scales: Tensor,
    second_scales: Tensor,
    signed: Table,
    unsigned: Table,
    key: Tensor,
    lasting: Tensor,
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update as `update_fp32` does, for weights [blocks, n] and moments in codes uint8 [blocks, n] and scales
    [blocks]."""
    before = dequantise(first, first_scales, signed), dequantise(second, second_scales, unsigned)
    new, m, v = _adamw(weights, grad, *before, lasting, numbers, betas, eps)
    skip = numbers[3]
    _keep_weights(weights, new, key, numbers)
    for moment, table, codes, scales in ((m, signed, first, first_scales), (v, unsigned, second, second_scales)):
        new_codes, new_scales = quantise(moment, table)
        codes.copy_(torch.where(skip, codes, new_codes))
        scales.copy_(torch.where(skip, scales, new_scales))


def _adamw(
    weights: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    lasting: Tensor,
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new weights and moments, float32."""
    rate, root, _, _, scale = numbers
    g, w = grad.float() * scale, weights.float()
    m = torch.lerp(m, g, 1 - betas[0])
    v = betas[1] * v + (1 - betas[1]) * g * g
    return w - lasting * w - rate * m / (v.sqrt() / root + eps), m, v


def _keep_weights(weights: Tensor, new: Tensor, key: Tensor, numbers: Numbers) -> None:
    _, _, count, skip, _ = numbers
    if weights.dtype == torch.bfloat16:
        new = round_stochastically(new, random_bits(key, count, new.numel()).view_as(new))
    weights.copy_(torch.where(skip, weights, new))


def kernel(update: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Return the function itself on a CPU; on CUDA compiled into a few kernels that move each tensor once."""
    return _compiled(update) if device.type == "cuda" else update


@lru_cache(maxsize=4)
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    compiled = torch.compile(update, fullgraph=True)

    def run(*args: Any) -> None:
        for x in args:
            if isinstance(x, Tensor) and x.ndim == 2:
                torch._dynamo.mark_static(x, 1)  # any number of blocks, but a kernel of its own for each length
        compiled(*args)

    return run
