"""The budget with which recomputed blocks of a bucket fill the memory that there is."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from longtake.models import block_counts
from longtake.parallel import INPUTS, Budget, Split
from longtake.plan.blocks import kept_by_lists
from longtake.plan.layout import Layout
from longtake.plan.memory import recomputed


@lru_cache(maxsize=64)
def budget_levels(config: Any, tensor: int) -> tuple[float, ...]:
    """Levels in order, of which each keeps more than the one before: inputs alone, then the smallest budget, in
    hundredths, that does."""
    found: dict[str, float] = {}
    for level in (INPUTS, *(hundredths / 100 for hundredths in range(101))):
        found.setdefault(str(kept_by_lists(config, level, tensor)), level)
    return tuple(found.values())


def fill_budget(config: Any, layout: Layout, needed: Callable[[Budget], int]) -> Budget:
    """The most that recomputed blocks may keep so that what is `needed` fits the layout's room.

    That is one of the levels for all blocks, or for as many of the last as fit the next one. Neighbours suffice: each
    level spares fewer FLOPs for a byte than the one before. Only one list of blocks has both, the later ones have the
    larger one throughout, so that there is one more graph to compile and not twice as many.
    """
    levels = budget_levels(config, layout.tensor)
    if needed(levels[-1]) <= layout.room:
        return levels[-1]
    fitting = bisect(levels[:-1], layout.room, key=needed)
    if not fitting:
        return levels[0]
    least, most = levels[fitting - 1 : fitting + 1]
    kept = [kept_by_lists(config, level, layout.tensor) for level in (least, most)]
    counts = zip(block_counts(config), recomputed(config, layout.remat), strict=True)
    differ = [count if kept[0][name] != kept[1][name] else 0 for name, count in counts]
    splits = [Split(most, least, _last(differ, number)) for number in range(1, sum(differ))]
    number = bisect(splits, layout.room, key=needed)
    return splits[number - 1] if number else least


def _last(counts: Sequence[int], number: int) -> tuple[int, ...]:
    """So many blocks from the end, of lists that have so many: how many of each list."""
    found = []
    for count in reversed(counts):
        found.append(min(count, number))
        number -= found[-1]
    return tuple(reversed(found))
