"""Rotary positions of heads (Su et al., RoFormer, 2021), written straight into what attention reads.

    (a, b) -> (a cos - b sin, b cos + a sin)        and back, with -sin, for gradients

for channels a and b of a pair. Angles and products are fp32, results have the dtype of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor


def rotate_and_join(parts: Sequence[Tensor], rope: Tensor, pairs: bool) -> Tensor:
    """Parts [B, l, ..., K] rotated, one behind the other: [B, S, ..., K], of their dtype.

    `rope`: fp32 [2, S, ..., K/2], of which no gradient is taken; `pairs`: channels (2j, 2j + 1) turn together, not
    (j, K/2 + j). Each number is written once, into the joined tensor: for the compiler, which fuses that itself, as an
    expression.
    """
    if for_compiler(parts):
        each = zip(parts, _of_each(rope, parts), strict=True)
        return torch.cat([_expression(x, of, pairs) for x, of in each], 1)
    return _RotateAndJoin.apply(rope, pairs, *parts)


def for_compiler(tensors: Sequence[Tensor]) -> bool:
    """Whether what is computed with them is written down for the compiler, by Dynamo or by AOTAutograd alone."""
    return torch.compiler.is_compiling() or any(isinstance(one, FunctionalTensor) for one in tensors)


class _RotateAndJoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rope: Tensor, pairs: bool, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(rope)
        ctx.pairs, ctx.lengths = pairs, [x.shape[1] for x in parts]
        first = parts[0]
        out = first.new_empty(first.shape[0], rope.shape[1], *first.shape[2:])
        for x, of, into in zip(parts, _of_each(rope, parts), out.split(ctx.lengths, 1), strict=True):
            _turn(x, of[0], of[1], pairs, into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rope,) = ctx.saved_tensors
        found = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _turn(grad, rope[0], -rope[1], ctx.pairs, found)
        return None, None, *found.split(ctx.lengths, 1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool, into: Tensor) -> None:
    (a, b), (to_a, to_b) = _halves(x, pairs), _halves(into, pairs)
    torch.sub(a * cos, b * sin, out=to_a)
    torch.add(b * cos, a * sin, out=to_b)


def _expression(x: Tensor, rope: Tensor, pairs: bool) -> Tensor:
    return turned(x.float(), rope[0], rope[1], pairs).to(x.dtype)  # cast once: gradients are added before rounding


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The formula above, for x [B, S, ..., K] in the dtype of the angles or a wider one; `pairs` as before."""
    a, b = _halves(x, pairs)
    found = a * cos - b * sin, b * cos + a * sin
    return torch.stack(found, -1).flatten(-2) if pairs else torch.cat(found, -1)


def _halves(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if pairs else x.chunk(2, -1)
    return a, b


def _of_each(rope: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return rope.split([x.shape[1] for x in parts], 1)
