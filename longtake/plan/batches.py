"""Batch sizes: the largest that fits a GPU, and the largest that takes no longer than it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from longtake.contracts import Bucket
from longtake.plan.layout import Layout
from longtake.plan.machine import Machine
from longtake.plan.work import Work

MOST_SAMPLES = 4096  # of one micro-batch; more is never of use


def largest_batch(work: Work, bucket: Bucket, layout: Layout, machine: Machine) -> int:
    """Return the largest batch size of a bucket that fits; 0: none does. A level that is "auto" is "full" for it."""
    return _most(lambda batch: machine.usable_bytes - work.memory(bucket, layout.least, batch).total, MOST_SAMPLES)


def balanced_batch(work: Work, bucket: Bucket, layout: Layout, machine: Machine, most: int, limit: float) -> int:
    """Return the largest batch size of a bucket, up to `most`, that takes no more than `limit` seconds; 0:
    none does."""

    def spare(batch: int) -> float:
        return limit - work.time(bucket, layout, machine, batch).seconds

    return most if not most or spare(most) >= 0 else _most(spare, most)


def _most(spare: Callable[[int], float], most: int) -> int:
    """Return the largest number up to `most` for which `spare`, which falls nearly evenly, is not below 0; 0: none."""
    left, tries = {number: spare(number) for number in (1, 2)}, 0
    while True:
        low = max((number for number in left if left[number] >= 0), default=0)
        high = min((number for number in left if left[number] < 0), default=most + 1)
        if high - low <= 1:
            return min(low, most)
        ends = sorted(left, key=lambda number: abs(number - low))[:2] if high not in left else (low, high)
        (one, other), tries = sorted(ends), tries + 1
        fall = (left[one] - left[other]) / (other - one)
        guess = low + int(left[low] / fall) if fall > 0 and tries % 4 else (low + high) // 2
        left[number] = spare(number := min(max(guess, low + 1), high - 1))


def longest_seconds(work: Work, layout: Layout, machine: Machine, largest: Mapping[Bucket, int]) -> float:
    """Return the longest time for a micro-batch, in seconds: that of the entry of most tokens at its largest batch.

    A step waits for its slowest rank, so others gain nothing from a larger batch that takes longer, and this one
    cannot be given a larger one.
    """
    fitting = [bucket for bucket, batch in largest.items() if batch]
    if not fitting:
        return 0.0
    longest = max(fitting, key=work.tokens)
    return work.time(longest, layout, machine, largest[longest]).seconds
