"""Differentiable collectives on tokens. Shares may differ in length and be empty.

Shapes: B batch, l tokens of a share, L tokens of all shares, D width, N heads. Dim 1 is the tokens'.

In compiled code an exchange is one operator, and lengths are `Lengths`: each rank's are numbers that the compiler does
not look into, so that one graph serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from longtake.parallel.collectives import all_gather_single, reduce_scatter_single

Map = Callable[[Tensor], Tensor]
Sizes = Sequence[Sequence[int]]  # for each rank of a group, its tokens of each of several sequences


class CountedGroup:
    """The first rank's view of a group whose other ranks are not there, for counting: what would come from them is
    memory of its size, what would be sent is added up."""

    def __init__(self) -> None:
        self.sent = 0  # bytes, to others
        self.group_name = f"counted {id(self)}"
        _counted[self.group_name] = self


_counted: WeakValueDictionary[str, CountedGroup] = WeakValueDictionary()


Group = dist.ProcessGroup | CountedGroup


@dataclass(frozen=True)
class Lengths:
    """Number of tokens, or other units, of each rank of a group, in the form that compiled code takes."""

    sizes: list[Tensor]  # int64 [ranks] on the CPU, of each of several sequences
    before: Any  # of this rank's share, a symbol
    after: Any  # and where all shares are together
    is_first: bool = False  # whether this rank is the first of the group


def group_of(name: str) -> Group:
    """Return the group that is called so."""
    return _counted.get(name) or _resolve_process_group(name)


def summed(sizes: Sequence[Tensor]) -> list[int]:
    """Tokens of each rank, of all sequences together."""
    return [sum(own) for own in zip(*(one.tolist() for one in sizes), strict=True)]


def rank_in(group: Group) -> int:
    """Return this rank's index in a group."""
    return 0 if isinstance(group, CountedGroup) else dist.get_rank(group)


def gather_output(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the last step of a cut forward: this rank's [B, l, D] -> [B, L, D] on every rank of `group`.

    All ranks then compute the same loss. In backward each takes its share of the gradient times the number of ranks,
    since gradients of parameters are averaged over ranks, while those of peers are terms of one sum.
    """
    before = sum(sizes[: (rank := rank_in(group))])

    def back(grad: Tensor) -> Tensor:
        return grad.narrow(1, before, sizes[rank]) * len(sizes)

    return _Linear.apply(x, partial(_gather, sizes=[(size,) for size in sizes], group=group), back)


def gather_tokens(x: Tensor, sizes: Sizes | Lengths, group: Group) -> Tensor:
    """Gather this rank's [B, l, D] to [B, L, D], sequence after sequence, each whole; the adjoint of
    `scatter_tokens`."""
    if isinstance(sizes, Lengths):
        return _between_peers(x, "gather", sizes.sizes, sizes.after, 0, group.group_name)
    return _Linear.apply(x, partial(_gather, sizes=sizes, group=group), partial(_scatter, sizes=sizes, group=group))


def scatter_tokens(x: Tensor, sizes: Sizes | Lengths, group: Group) -> Tensor:
    """Partial sums [B, L, D] -> their sum over the ranks, of which each gets its own tokens [B, l, D]."""
    if isinstance(sizes, Lengths):
        return _between_peers(x, "scatter", sizes.sizes, sizes.before, 0, group.group_name)
    return _Linear.apply(x, partial(_scatter, sizes=sizes, group=group), partial(_gather, sizes=sizes, group=group))


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """All-to-all along dim 0: rows `send[i]` go to rank i, rows `receive[i]` come from it."""
    send, receive = list(send), list(receive)
    there = partial(_all_to_all, send=send, receive=receive, group=group)
    return _Linear.apply(x, there, partial(_all_to_all, send=receive, receive=send, group=group))


def switch(x: Tensor, rows: Sequence[int] | Lengths, columns: Sequence[int] | Lengths, group: Group) -> Tensor:
    """Own rows and all columns [B, r, C, ...] -> all rows and own columns [B, R, c, ...], such as tokens and heads;
    `switch_back` and back.

    rows, columns: of each rank of the group, in their order.
    """
    if isinstance(rows, Lengths):
        sizes = [*rows.sizes, *columns.sizes]
        return _between_peers(x, "switch", sizes, rows.after, columns.before, group.group_name)
    own, one = rank_in(group), len(x) * math.prod(x.shape[3:])  # numbers at one row and column
    send = [rows[own] * count * one for count in columns]
    receive = [count * columns[own] * one for count in rows]
    parts = [part.transpose(0, 1).flatten() for part in x.split(list(columns), 2)]
    out = exchange(torch.cat(parts), send, receive, group)
    return out.view(sum(rows), len(x), columns[own], *x.shape[3:]).transpose(0, 1)


def switch_back(x: Tensor, rows: Sequence[int] | Lengths, columns: Sequence[int] | Lengths, group: Group) -> Tensor:
    """All rows and own columns -> own rows and all columns."""
    if isinstance(rows, Lengths):
        sizes = [*rows.sizes, *columns.sizes]
        return _between_peers(x, "switch_back", sizes, rows.before, columns.after, group.group_name)
    return switch(x.transpose(1, 2), columns, rows, group).transpose(1, 2)


def to_heads(x: Tensor, tokens: Sequence[int] | Lengths, heads: int, group: Group) -> Tensor:
    """Own tokens of all heads [B, l, N, ...] -> all tokens of own heads, `heads` on each rank; `to_tokens` and back."""
    if isinstance(tokens, Lengths):
        return _between_peers(x, "to_heads", tokens.sizes, tokens.after, heads, group.group_name)
    assert x.shape[1] == tokens[rank_in(group)], f"{x.shape[1]} tokens, shares of {tokens}"
    return switch(x, tokens, [heads] * len(tokens), group)


def to_tokens(x: Tensor, tokens: Sequence[int] | Lengths, heads: int, group: Group) -> Tensor:
    """All tokens of own heads -> own tokens of all heads."""
    if isinstance(tokens, Lengths):
        whole = heads * len(tokens.sizes[0])
        return _between_peers(x, "to_tokens", tokens.sizes, tokens.before, whole, group.group_name)
    return switch_back(x, tokens, [heads] * len(tokens), group)


# Operators of compiled code in which ranks meet; attention's only where it is given a group of them, as by a ring.
_ATTENTION = "attention", "attention_backward"
EXCHANGES = tuple(f"longtake.{name}.default" for name in ("between_peers", "halo_between_peers", *_ATTENTION))


@torch.library.custom_op("longtake::between_peers", mutates_args=())
def _between_peers(x: Tensor, how: str, sizes: Sequence[Tensor], rows: int, columns: int, group: str) -> Tensor:
    """Return the exchange of that name; rows, columns: dims 1 and 2 of its result, where it changes them."""
    peers = group_of(group)
    if how == "sum":
        return _all_reduce(x, peers)
    if how in ("switch", "switch_back"):
        return (switch if how == "switch" else switch_back)(x, *(one.tolist() for one in sizes), peers)
    if how in ("to_heads", "to_tokens"):
        heads = columns if how == "to_heads" else x.shape[2]
        return (to_heads if how == "to_heads" else to_tokens)(x, summed(sizes), heads, peers)
    of_ranks = list(zip(*(one.tolist() for one in sizes), strict=True))
    return (_gather if how == "gather" else _scatter)(x, of_ranks, peers).contiguous()


@_between_peers.register_fake
def _(x: Tensor, how: str, sizes: Sequence[Tensor], rows: int, columns: int, group: str) -> Tensor:
    if how == "sum":
        return x.new_empty(x.shape)
    if how in ("to_heads", "switch"):
        return x.new_empty(rows, x.shape[0], columns, *x.shape[3:]).transpose(0, 1)
    if how in ("to_tokens", "switch_back"):
        return x.new_empty(columns, x.shape[0], rows, *x.shape[3:]).transpose(0, 1).transpose(1, 2)
    return x.new_empty(x.shape[0], rows, x.shape[2])


_PAIRS = (("gather", "scatter"), ("to_heads", "to_tokens"), ("switch", "switch_back"), ("halo", "fold"), ("sum", "sum"))
_ADJOINT = dict(_PAIRS) | {back: there for there, back in _PAIRS}


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.how, sizes, _, _, ctx.peers = inputs
    ctx.save_for_backward(*sizes)
    ctx.rows, ctx.columns = (*x.shape[1:3], 0, 0)[:2]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sizes = list(ctx.saved_tensors)
    found = _between_peers(grad, _ADJOINT[ctx.how], sizes, ctx.rows, ctx.columns, ctx.peers)
    return found, None, [None] * len(sizes), None, None, None


_between_peers.register_autograd(_differentiate, setup_context=_save)


def with_halo(tensors: Sequence[Tensor], width: int, sizes: Sequence[int] | Lengths, group: Group) -> list[Tensor]:
    """Extend this rank's [B, l, ...], alike in shape, to [B, width + l, ...]: after the last `width` tokens of the
    previous rank, where there is one and this shard is not empty; the adjoint of `fold_halo`. sizes: tokens of each
    rank."""
    if isinstance(sizes, Lengths):
        before = 0 if sizes.is_first else width
        return _halo_between_peers(list(tensors), "halo", *sizes.sizes, width, before, group.group_name)
    send, receive = _halo(width, sizes, group)
    ends = torch.stack([x[:, x.shape[1] - sum(send) :] for x in tensors]).transpose(0, 2)
    received = exchange(ends, send, receive, group).transpose(0, 2)
    return [torch.cat([halo, x], dim=1) for halo, x in zip(received, tensors, strict=True)]


def fold_halo(tensors: Sequence[Tensor], width: int, sizes: Sequence[int] | Lengths, group: Group) -> list[Tensor]:
    """[B, width + l, ...], alike in shape -> [B, l, ...], where the first `width` tokens are added to the last ones of
    the rank before."""
    if isinstance(sizes, Lengths):
        before = 0 if sizes.is_first else width
        return _halo_between_peers(list(tensors), "fold", *sizes.sizes, width, before, group.group_name)
    send, receive = _halo(width, sizes, group)
    halos = torch.stack([x[:, : sum(receive)] for x in tensors]).transpose(0, 2)
    ends = exchange(halos, receive, send, group).transpose(0, 2)
    own = [x[:, sum(receive) :].split([x.shape[1] - sum(receive) - sum(send), sum(send)], dim=1) for x in tensors]
    return [torch.cat([before, last + end], dim=1) for (before, last), end in zip(own, ends, strict=True)]


def _halo(width: int, sizes: Sequence[int], group: Group) -> tuple[list[int], list[int]]:
    """Tokens that this rank sends to each and receives from each. Empty shares are the last ones."""
    own = rank_in(group)
    assert all(size >= width for size in sizes if size), f"{width} tokens of shares of {sizes}"
    send = [width * (i == own + 1 and size > 0) for i, size in enumerate(sizes)]
    return send, [width * (i == own - 1 and sizes[own] > 0) for i in range(len(sizes))]


@torch.library.custom_op("longtake::halo_between_peers", mutates_args=())
def _halo_between_peers(
    tensors: Sequence[Tensor], how: str, sizes: Tensor, width: int, before: int, group: str
) -> list[Tensor]:
    """`with_halo` ("halo") or `fold_halo` ("fold"); before: tokens that lie in front of this rank's own."""
    found = (with_halo if how == "halo" else fold_halo)(tensors, width, sizes.tolist(), group_of(group))
    return [x.contiguous() for x in found]


@_halo_between_peers.register_fake
def _(tensors: Sequence[Tensor], how: str, sizes: Tensor, width: int, before: int, group: str) -> list[Tensor]:
    more = before if how == "halo" else -before
    return [x.new_empty(x.shape[0], x.shape[1] + more, *x.shape[2:]) for x in tensors]


def _save_halo(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.how, sizes, ctx.width, ctx.before, ctx.peers = inputs
    ctx.save_for_backward(sizes)


def _differentiate_halo(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    adjoint, (sizes,) = _ADJOINT[ctx.how], ctx.saved_tensors
    return _halo_between_peers(grads, adjoint, sizes, ctx.width, ctx.before, ctx.peers), *[None] * 5


_halo_between_peers.register_autograd(_differentiate_halo, setup_context=_save_halo)


def sum_of_all(x: Tensor, group: Group, compiled: bool = False) -> Tensor:
    """Return the sum of x over the ranks, on each of them; so is the gradient, of which each has a term. compiled:
    as compiled code has it."""
    if compiled:
        return _between_peers(x, "sum", [], 0, 0, group.group_name)
    there = partial(_all_reduce, group=group)
    return _Linear.apply(x, there, there)


class _Linear(torch.autograd.Function):
    """A linear map, and what its backward does to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _gather(x: Tensor, sizes: Sizes, group: Group) -> Tensor:
    longest = max(sum(own) for own in sizes)
    padded = F.pad(x, (0, 0, 0, longest - x.shape[1])).contiguous()
    shares = x.new_empty(len(sizes), *padded.shape)
    if isinstance(group, CountedGroup):
        group.sent += shares[1:].nbytes
    else:
        all_gather_single(shares.flatten(0, 1), padded, group)
    return torch.cat([shares[rank].narrow(1, start, size) for rank, start, size in _in_order(sizes)], dim=1)


def _scatter(x: Tensor, sizes: Sizes, group: Group) -> Tensor:
    longest = max(sum(own) for own in sizes)
    shares = x.new_zeros(len(sizes), x.shape[0], longest, x.shape[2])
    offset = 0
    for rank, start, size in _in_order(sizes):
        shares[rank].narrow(1, start, size).copy_(x.narrow(1, offset, size))
        offset += size
    own = x.new_empty(shares.shape[1:])
    if isinstance(group, CountedGroup):
        group.sent += shares[1:].nbytes
    else:
        reduce_scatter_single(own, shares.flatten(0, 1), group=group)
    return own.narrow(1, 0, sum(sizes[rank_in(group)]))


def _in_order(sizes: Sizes) -> list[tuple[int, int, int]]:
    """(rank, start in its share, size) of every piece, in the order of the whole: by sequence, then by rank."""
    starts = [0] * len(sizes)
    pieces = []
    for sequence in range(len(sizes[0])):
        for rank, own in enumerate(sizes):
            pieces.append((rank, starts[rank], own[sequence]))
            starts[rank] += own[sequence]
    return pieces


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if isinstance(group, CountedGroup):
        group.sent += 2 * x.nbytes
    else:
        dist.all_reduce(x, group=group)
    return x


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    x = x.contiguous()
    if isinstance(group, CountedGroup):
        group.sent += x[send[0] :].nbytes
    else:
        dist.all_to_all_single(out, x, receive, send, group=group)
    return out
