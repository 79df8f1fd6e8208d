"""Ring attention: keys and values are passed round a ring of ranks, each with its own queries (Liu et al. 2023).

Partial results are merged by their log-sum-exp in float32, so the result is that of full attention. In backward,
float32 gradients of keys and values go round with them. Communication overlaps with computation. Shares may differ in
length and be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.models.attention_kernels import attend_block, attend_block_backward
from longtake.models.attention_op import AMONG_RANKS, attention
from longtake.models.config import Backend
from longtake.parallel.exchange import CountedGroup, Group, Lengths, group_of, rank_in, summed


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | Lengths, group: Group, backend: Backend = "auto"
) -> Tensor:
    """Attention over the tokens of all ranks of `group`: q, k, v [B, l, N, K] of own tokens -> [B, l, N, K].

    `lengths`: tokens of each rank of the group, in its order; `backend`: what the run's attention is.
    """
    counted = isinstance(group, CountedGroup)
    if not counted and type(q) is not Tensor:  # a stand-in, on which every operation is counted
        return _Ring.apply(q, k, v, list(lengths), group, backend)
    sizes = lengths.sizes if isinstance(lengths, Lengths) else [torch.tensor(lengths)]
    return attention(q, k, v, backend, sizes, group.group_name)[0]


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions of the same queries to different keys -> that to all keys.

    out, more: float32 [B, N, l, K]; lse: float32 [B, N, l], log of the sum of the exponentials of the scores.
    """
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], group: Group, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Return the result [B, l, N, K] and the log-sum-exp of the scores [B, N, l]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, l, K]
    rank, num = rank_in(group), len(lengths)
    keys = torch.stack([k, v])
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    for turn in range(num):
        coming = None
        if turn + 1 < num:
            coming = _pass_on(keys, lengths[(rank - turn - 1) % num], group)
        if keys.shape[3] and q.shape[2]:
            part, part_lse = attend_block(q, keys[0], keys[1], backend)
            out, lse = merge(out, lse, part.float(), part_lse)
        if coming is not None:
            keys = coming.wait()
    out = out.to(q.dtype)
    return out.transpose(1, 2), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lengths: Sequence[int], group: Group, backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v [B, l, N, K]."""
    q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))  # [B, N, l, K]
    if grad.stride(-1) != 1:
        grad = grad.contiguous()  # kernels ask for whole rows
    rank, num = rank_in(group), len(lengths)
    keys = torch.stack([k, v])
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    passengers = None  # gradients of the current keys and values, from the ranks they have visited
    for turn in range(num):
        coming = None
        if turn + 1 < num:
            coming = _pass_on(keys, lengths[(rank - turn - 1) % num], group)
        own = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
        if keys.shape[3] and q.shape[2]:
            part, dk, dv = attend_block_backward(grad, q, keys[0], keys[1], out, lse, backend)
            dq += part
            own[0], own[1] = dk, dv
        if passengers is not None:
            own += passengers.wait()
        passengers = _pass_on(own, lengths[(rank - turn - 1) % num], group, tag=1)
        if coming is not None:
            keys = coming.wait()
    dk, dv = passengers.wait()
    return tuple(g.to(q.dtype, copy=True).transpose(1, 2) for g in (dq, dk, dv))  # outputs share no memory


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        out, lse = _forward(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad, *ctx.saved_tensors, *ctx.how), None, None, None


def _named(compute: Callable[..., Any], *args: Any) -> Any:
    """Call `compute` with the operator's arguments: last come lengths of each of several sequences, a group's name, and
    a backend."""
    *tensors, lengths, group, backend = args
    return compute(*tensors, summed(lengths), group_of(group), backend)


AMONG_RANKS.update(forward=partial(_named, _forward), backward=partial(_named, _backward))


class _Transfer:
    """A tensor on its way to the next rank, and one on its way here."""

    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> Tensor:
        """Wait for the tensor from the previous rank, and return it."""
        for work in self._works:
            work.wait()
        return self._received


def _pass_on(x: Tensor, tokens: int, group: Group, tag: int = 0) -> _Transfer:
    """Start sending x [2, B, N, l, K] to the next rank of the ring and receiving [2, B, N, tokens, K].

    Concurrent transfers need different tags (where the backend has tags: NCCL goes by order).
    """
    x = x.contiguous()
    received = x.new_empty(*x.shape[:3], tokens, x.shape[4])
    if isinstance(group, CountedGroup):
        group.sent += x.nbytes
        return _Transfer([], x, received)
    rank, num = dist.get_rank(group), dist.get_world_size(group)
    operations = []
    if x.numel():
        operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % num, tag=tag))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % num, tag=tag))
    return _Transfer(dist.batch_isend_irecv(operations) if operations else [], x, received)
