"""Attention as one operator with its own backward: in eager and compiled blocks, in one process and among ranks.

It gives its result and the log-sum-exp of its scores, from which backward starts; recomputation can keep both
(`parallel.recomputation`). What computes it (`attention_kernels`, a ring of ranks) is found out when it runs: the
compiler sees one operator for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from longtake.models.attention_kernels import attend, attend_backward, kernel_of_all
from longtake.models.config import Backend

OPENED: dict[Any, Callable[..., Any]] = {}  # operators that a trace takes apart, and what they are made of
# What computes attention among ranks, forward and backward; `parallel.ring` puts them here.
AMONG_RANKS: dict[str, Callable[..., Any]] = {}


def attention(
    q: Tensor, k: Tensor, v: Tensor, backend: Backend, lengths: Sequence[Tensor] = (), group: str = ""
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v, no mask, and the log-sum-exp of its scores, which has no gradient.

    q [B, l, N, K], k and v [B, m, N, K] -> [B, l, N, K] and [B, N, l] in float32 (float64 for float64). `backend`:
    "fa3", "flash", "cudnn" or "efficient", or "auto" and "sdpa" for the kernel that PyTorch would take. `group`: name
    of the group of ranks whose keys are attended to, "" for this rank's alone; `lengths`: for each of several sequences
    the tokens of each of its ranks, int64 [ranks] on the CPU.
    """
    return _attention(q, k, v, backend, list(lengths), group)


@torch.library.custom_op("longtake::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, backend: str, lengths: Sequence[Tensor], group: str
) -> tuple[Tensor, Tensor]:
    if group:
        return AMONG_RANKS["forward"](q, k, v, lengths, group, backend)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(*heads, kernel_of_all(*heads, backend))
    return out.to(q.dtype).transpose(1, 2).contiguous(), lse.contiguous()


@torch.library.custom_op("longtake::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    backend: str, lengths: Sequence[Tensor], group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    if grad.stride(-1) != 1:
        grad = grad.contiguous()  # kernels ask for whole rows
    if group:
        return AMONG_RANKS["backward"](grad, q, k, v, out, lse, lengths, group, backend)
    which = kernel_of_all(*(x.transpose(1, 2) for x in (q, k, v)), backend)
    found = attend_backward(*(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, which)
    return tuple(one.to(q.dtype).transpose(1, 2).contiguous() for one in found)


def _laid(x: Tensor, group: str) -> Tensor:
    """Return a new tensor [B, l, N, K]; what comes from a ring has its heads before its tokens in memory."""
    if group:
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
    return x.new_empty(x.shape)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, backend: str, lengths: Any, group: str) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(q.dtype, torch.float32)
    return _laid(q, group), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=kind)


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_laid(x, rest[-1]) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.backend, lengths, ctx.group = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *lengths)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, *lengths = ctx.saved_tensors  # which recomputation gives once
    none = None, [None] * len(lengths), None
    if grad is None:
        return None, None, None, *none
    return *_attention_backward(grad, q, k, v, out, lse, ctx.backend, lengths, ctx.group), *none


_attention.register_autograd(_differentiate, setup_context=_save)
OPENED[torch.ops.longtake.attention.default] = _attention._init_fn
OPENED[torch.ops.longtake.attention_backward.default] = _attention_backward._init_fn


def _heads_first(shape: Sequence[int], ranks: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    batch, tokens, heads, width = shape
    return batch, heads, tokens * (ranks[0][0] if ranks else 1), width


@register_flop_formula(torch.ops.longtake.attention)
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], _: str, lengths: Any, *rest: Any, **named: Any) -> int:
    """Of all ranks' keys as if each had as many as this one."""
    return sdpa_flop_count(_heads_first(q), _heads_first(k, lengths), _heads_first(v, lengths))


@register_flop_formula(torch.ops.longtake.attention_backward)
def _flops_backward(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], out: Any, lse: Any, _: str, lengths: Any,
    *rest: Any, **named: Any,
) -> int:  # fmt: skip
    return sdpa_backward_flop_count(*map(_heads_first, (grad, q)), *(_heads_first(one, lengths) for one in (k, v)))
