"""Which rank holds the others up: scores as NVIDIA's resiliency extension defines them, from 0 to 1, where 1 is best.

https://nvidia.github.io/nvidia-resiliency-ext/straggler_det/usage_guide.html; below 0.75 it calls a rank a straggler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

STEPS = 50  # whose median counts


class Scores:
    """Of the ranks of a run, by the time that each takes for the same work."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Sequence[float]]] = deque()
        self._best: list[float] = []
        self._now: list[float] = []  # medians, by rank

    def add(self, step: int, times: Sequence[float]) -> None:
        """Take in the time of each rank, above 0, at a step. Where the number of ranks changes, all begins anew."""
        if len(times) != len(self._best):
            self._recent.clear()
            self._best = list(times)
        self._recent.append((step, times))
        while self._recent[0][0] <= step - STEPS:
            self._recent.popleft()
        self._now = [median(of_rank) for of_rank in zip(*(times for _, times in self._recent), strict=True)]
        self._best = list(map(min, self._best, self._now))

    def relative(self) -> list[float]:
        """By rank: the fastest rank's median time over its own."""
        return [min(self._now) / own for own in self._now]

    def individual(self) -> list[float]:
        """By rank: its own best median time over its present one."""
        return [best / own for best, own in zip(self._best, self._now, strict=True)]
