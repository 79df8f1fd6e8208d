"""Temporal attention, at each place, as an operator of its own: for rows that are short and many."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

MOST_FRAMES, MOST_WIDTH = 128, 128
_HAS_TRITON = find_spec("triton") is not None


def fits(q: Tensor) -> bool:
    """Whether the kernels take queries [B, F, S, N, K]; they hold all frames of a place at once."""
    if not (_HAS_TRITON and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return False
    _, frames, places, _, width = q.shape
    return 0 < frames <= MOST_FRAMES and places > 0 and 16 <= width <= MOST_WIDTH and width % 2 == 0


@torch.library.custom_op("longtake::attend_over_time", mutates_args=())
def attend_over_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the frames at each place: q, k, v and the result are [B, F, S, N, K]."""
    from longtake.models import temporal_kernels

    return temporal_kernels.forward(q, k, v)


@torch.library.custom_op("longtake::attend_over_time_backward", mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from longtake.models import temporal_kernels

    return temporal_kernels.backward(grad, q, k, v)


@attend_over_time.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return _backward(grad, *ctx.saved_tensors)


attend_over_time.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.longtake.attend_over_time)
def _flops_forward(q: Sequence[int], *rest: Any, **named: Any) -> int:
    batch, frames, places, heads, width = q
    return 4 * batch * places * heads * frames**2 * width


@register_flop_formula(torch.ops.longtake.attend_over_time_backward)
def _flops_backward(grad: Sequence[int], *rest: Any, **named: Any) -> int:
    return 5 * _flops_forward(grad) // 2
