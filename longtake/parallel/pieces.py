"""Work that falls into parts which need nothing of each other, tiles or captions, dealt out over the ranks that share
a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.parallel.tokens import share

R = TypeVar("R")


class SharedPiece(Protocol):
    """What has to be known of a piece by those who do not compute it."""

    @property
    def run(self) -> Callable[[], Tensor]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class PieceShare:
    """Computes pieces over the ranks of a group: each rank its own, then each sends its results to all.

    `group`: asked for at every call, for it may change from one micro-batch to the next; None: this rank is alone.
    All ranks of the group call it with pieces of the same shapes, in the same order. Results are those of one rank, bit
    by bit, and the same memory on all.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None], dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device

    def __call__(self, pieces: Sequence[SharedPiece]) -> list[Tensor]:
        """The results in order, each `[*shape]`, of `dtype` on the device. Collective over the group."""
        group = self._group()
        if group is None:
            return [piece.run() for piece in pieces]
        rank, owners = dist.get_rank(group), deal([math.prod(p.shape) for p in pieces], dist.get_world_size(group))
        own = {i: pieces[i].run().contiguous() for i, owner in enumerate(owners) if owner == rank}
        results = []
        for i, piece in enumerate(pieces):
            result = own.get(i)
            if result is None:
                result = torch.empty(piece.shape, dtype=self._dtype, device=self._device)
            assert tuple(result.shape) == tuple(piece.shape), f"{tuple(result.shape)} where {piece.shape} was said"
            assert result.dtype == self._dtype, f"{result.dtype} where {self._dtype} was said"
            dist.broadcast(result.view(-1).view(torch.uint8), group=group, group_src=owners[i])
            results.append(result)
        return results


class RowShare:
    """Computes the rows of a batch over the ranks of a group: each a stretch of them at once, then all have all.

    `group`: as of `PieceShare`. All ranks of the group call it with the same rows. `every_rank`: a rank that is dealt
    none computes the first row and throws it away, because `run` has to be called by all ranks equally often.
    """

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup | None],
        dtype: torch.dtype,
        device: torch.device,
        every_rank: bool = False,
    ) -> None:
        self._group, self._dtype, self._device, self._every_rank = group, dtype, device, every_rank

    def __call__(self, rows: Sequence[R], run: Callable[[Sequence[R]], Tensor], shape: tuple[int, ...]) -> Tensor:
        """`[B, *shape]` on the device: of each stretch `[n, *shape]` what `run` makes of it. Collective over the group.

        `run` is called once, or not at all.
        """
        group = self._group()
        if group is None:
            return run(rows)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        stretches = [slice(start, start + count) for start, count in (share(len(rows), size, i) for i in range(size))]
        own = rows[stretches[rank]]
        if own:
            made = run(own)
            assert made.shape == (len(own), *shape), f"{tuple(made.shape)} where {(len(own), *shape)} was said"
            assert made.dtype == self._dtype, f"{made.dtype} where {self._dtype} was said"
        elif self._every_rank:
            run(rows[:1])
        results = torch.empty((len(rows), *shape), dtype=self._dtype, device=self._device)
        if own:
            results[stretches[rank]] = made
        for owner, stretch in enumerate(stretches):
            if rows[stretch]:
                dist.broadcast(results[stretch].view(-1).view(torch.uint8), group=group, group_src=owner)
        return results


def deal(costs: Sequence[int], ranks: int) -> list[int]:
    """Which rank computes each piece: the most expensive first, each to the rank that has least to do."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners
