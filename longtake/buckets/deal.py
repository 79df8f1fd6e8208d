"""The slots of a step, dealt to data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from longtake.contracts import Bucket, Slot
from longtake.random import hash64


def deal(slots: Sequence[Slot], num_ranks: int, slots_per_step: int, rank: int) -> list[Slot]:
    """The micro-steps of one data rank: slot s is run by rank s mod R in micro-step s // R.

    All ranks get the same number of micro-steps, ceil(number of slots / R). Where R does not divide the slots, the
    ranks left over in the last micro-step get a slot of weight 0, in the cheapest shape of the step. `slots`: all
    slots of the step, 1..`slots_per_step`, the same list on every rank.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank = {rank}: it must lie in 0..{num_ranks - 1}")
    if not 1 <= len(slots) <= slots_per_step:
        raise ValueError(f"{len(slots)} slots: a step has 1..{slots_per_step}")
    dealt = list(slots[rank::num_ranks])
    if len(dealt) < -(-len(slots) // num_ranks):
        cheapest = min(slots, key=lambda slot: (_cost(slot.bucket), slot.bucket.name))
        dealt.append(replace(cheapest, weights=np.zeros_like(cheapest.weights)))
    return dealt


def step_digest(slots: Sequence[Slot]) -> int:
    """A 64-bit digest of the keys of the real samples of a step, in order: equal on any number of ranks."""
    return hash64(*(slot.keys[slot.weights > 0].astype("<u8").tobytes() for slot in slots if slot.is_real))


def _cost(bucket: Bucket) -> int:
    frames, height, width = bucket.shape
    return frames * height * width * bucket.batch_size
