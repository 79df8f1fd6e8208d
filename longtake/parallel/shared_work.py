"""Independent tiles or captions, dealt out over the ranks that share a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.parallel.tokens import share

R = TypeVar("R")


@dataclass(frozen=True)
class Tile:
    """An independent computation and, for the ranks that do not run it, the shape of its result."""

    run: Callable[[], Tensor]
    shape: tuple[int, ...]


class TileShare:
    """Computes tiles over the ranks of a group: each rank its own, then every result is broadcast.

    `group`: called each time, since it may change from one micro-batch to the next; None: this rank is alone. All ranks
    of the group pass tiles of the same shapes in the same order. Results are bit for bit those of one rank.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None], dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device

    def __call__(self, tiles: Sequence[Tile]) -> list[Tensor]:
        """The results in order, each `[*shape]`, of `dtype` on the device. Collective over the group."""
        group = self._group()
        if group is None:
            return [tile.run() for tile in tiles]
        rank, owners = dist.get_rank(group), deal([math.prod(p.shape) for p in tiles], dist.get_world_size(group))
        own = {i: tiles[i].run().contiguous() for i, owner in enumerate(owners) if owner == rank}
        results = []
        for i, tile in enumerate(tiles):
            result = own.get(i)
            if result is None:
                result = torch.empty(tile.shape, dtype=self._dtype, device=self._device)
            assert tuple(result.shape) == tuple(tile.shape), f"found {tuple(result.shape)}, expected {tile.shape}"
            assert result.dtype == self._dtype, f"found {result.dtype}, expected {self._dtype}"
            dist.broadcast(result.view(-1).view(torch.uint8), group=group, group_src=owners[i])
            results.append(result)
        return results


class RowShare:
    """Computes the rows of a batch over the ranks of a group: each a contiguous range, which is then broadcast.

    `group`: as of `TileShare`. All ranks of the group pass the same rows. `every_rank`: a rank with an empty range
    computes the first row and discards it, because `run` is itself collective.
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
        """`[B, *shape]` on the device; `run` makes `[n, *shape]` of n rows, called at most once. Collective over the
        group."""
        group = self._group()
        if group is None:
            return run(rows)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        stretches = [slice(start, start + count) for start, count in (share(len(rows), size, i) for i in range(size))]
        own = rows[stretches[rank]]
        if own:
            made = run(own)
            assert made.shape == (len(own), *shape), f"found {tuple(made.shape)}, expected {(len(own), *shape)}"
            assert made.dtype == self._dtype, f"found {made.dtype}, expected {self._dtype}"
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
    """Which rank computes each tile: the most expensive first, each to the least loaded rank."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners
