"""The micro-batches of a step, dealt to data ranks and to the subgroups of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from longtake.contracts import Bucket, Slot
from longtake.random import hash64


@dataclass(frozen=True)
class Forward:
    """What the peers of one data rank run at once: micro-batches of one bucket, one for each subgroup."""

    slots: tuple[Slot, ...]  # S / d of them; fillers, of weight 0, come last
    first: int  # place of the first among the step's micro-batches

    def number(self, index: int) -> int | None:
        """Return the place of micro-batch `index` among those of the step; None for a filler."""
        return self.first + index if self.slots[index].is_real else None


def deal(
    slots: Sequence[Slot], num_ranks: int, rank: int, at_once: Callable[[Bucket], int] = lambda bucket: 1
) -> list[Forward]:
    """Return the forwards of one data rank in a step.

    `slots`: all micro-batches of the step in their order, the same list on every rank; `at_once`: how many of a bucket
    a data rank runs side by side. Neighbours in the list that are of one bucket share forwards of that many, and
    forward f is made by rank f mod R. All ranks make the same number of them; where R does not divide it, the ranks
    left over get one of weight 0, the cheapest of the step.
    """
    forwards = _forwards(slots, at_once)
    dealt = forwards[rank::num_ranks]
    if len(dealt) < -(-len(forwards) // num_ranks):
        cheapest = min(forwards, key=lambda forward: (_cost(forward), forward.slots[0].bucket.name))
        dealt.append(replace(cheapest, slots=tuple(_filler(slot) for slot in cheapest.slots)))
    return dealt


def _forwards(slots: Sequence[Slot], at_once: Callable[[Bucket], int]) -> list[Forward]:
    found, first = [], 0
    for bucket, same in groupby(slots, key=lambda slot: slot.bucket):
        together, size = tuple(same), at_once(bucket)
        for start in range(0, len(together), size):
            own = together[start : start + size]
            found.append(Forward(own + (_filler(own[-1]),) * (size - len(own)), first + start))
        first += len(together)
    return found


def _filler(slot: Slot) -> Slot:
    return replace(slot, weights=np.zeros_like(slot.weights))


def step_digest(slots: Sequence[Slot]) -> int:
    """Return a 64-bit digest of the keys of the real samples of a step, in order: equal on any number of ranks."""
    return hash64(*(slot.keys[slot.weights > 0].astype("<u8").tobytes() for slot in slots if slot.is_real))


def _cost(forward: Forward) -> int:
    bucket = forward.slots[0].bucket
    frames, height, width = bucket.shape
    return frames * height * width * bucket.batch_size * len(forward.slots)
