"""Independent tiles or captions, dealt out over the ranks that share a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.parallel.tokens import share

R = TypeVar("R")
Group = Callable[[], dist.ProcessGroup | None]


@dataclass(frozen=True)
class Tile:
    """An independent computation and, for the ranks that do not run it, the shape of its result."""

    run: Callable[[], Tensor]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TileShare:
    """Computes tiles over the ranks of a group: each rank its own, then every result is broadcast.

    `group`: called each time, since it may change from one micro-batch to the next; None: this rank is alone. All ranks
    of the group pass tiles of the same shapes in the same order. Results are bit for bit those of one rank.
    """

    group: Group
    dtype: torch.dtype
    device: torch.device

    def __call__(self, tiles: Sequence[Tile]) -> list[Tensor]:
        """Return the results in order, each `[*shape]`, of `dtype` on the device. Collective over the group."""
        group = self.group()
        if group is None:
            return [tile.run() for tile in tiles]
        rank, owners = dist.get_rank(group), deal([math.prod(p.shape) for p in tiles], dist.get_world_size(group))
        own = {i: tiles[i].run().contiguous() for i, owner in enumerate(owners) if owner == rank}
        results = []
        for i, tile in enumerate(tiles):
            result = own.get(i)
            if result is None:
                result = torch.empty(tile.shape, dtype=self.dtype, device=self.device)
            assert tuple(result.shape) == tuple(tile.shape), f"found {tuple(result.shape)}, expected {tile.shape}"
            assert result.dtype == self.dtype, f"found {result.dtype}, expected {self.dtype}"
            dist.broadcast(result.view(-1).view(torch.uint8), group=group, group_src=owners[i])
            results.append(result)
        return results


@dataclass(frozen=True)
class RowShare:
    """Computes the rows of a batch over the ranks of a group: each a contiguous range, which is then broadcast.

    `group`: as of `TileShare`. All ranks of the group pass the same rows. `every_rank`: a rank with an empty range
    computes the first row and discards it, because `run` is itself collective.
    """

    group: Group
    dtype: torch.dtype
    device: torch.device
    every_rank: bool = False

    def __call__(self, rows: Sequence[R], run: Callable[[Sequence[R]], Tensor], shape: tuple[int, ...]) -> Tensor:
        """`[B, *shape]` on the device; `run` makes `[n, *shape]` of n rows, called at most once. Collective over the
        group."""
        group = self.group()
        if group is None:
            return run(rows)
        size = dist.get_world_size(group)
        ranges = [share(len(rows), size, rank) for rank in range(size)]  # longer ones first, as `deal` takes them
        if self.every_rank and not ranges[dist.get_rank(group)][1]:
            run(rows[:1])
        tiles = [Tile(partial(run, rows[at : at + count]), (count, *shape)) for at, count in ranges if count]
        return torch.cat(TileShare(self.group, self.dtype, self.device)(tiles))


def deal(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that computes each tile: the most expensive first, each to the least loaded rank."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners
