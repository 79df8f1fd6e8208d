"""Which clips of a table are held back for validation."""

from __future__ import annotations

import numpy as np

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.protocol import Unused
from longtake.buckets.sweep import Sweep, sort_samples

_OF_THIS_PASS = (Unused.SKIPPED, Unused.NOT_KEPT)  # another pass may put these into a bucket


def choose_held_back(inputs: OrderInputs, numbers: np.ndarray, share: float) -> np.ndarray:
    """bool [N]: the whole number of clips nearest to `share` of those that train, by ascending `numbers`.

    The last clip of a bucket, as pass 0 fills it, is never chosen: the bucket would vanish from the training.
    """
    ids = np.asarray(inputs.clip_ids, np.uint64)
    codes = sort_samples(Sweep(inputs, 0, None, ids, (), {})).codes
    trains = (codes >= 0) | np.isin(codes, [int(reason) for reason in _OF_THIS_PASS])
    trains &= np.broadcast_to(np.asarray(inputs.weights) > 0, trains.shape)
    rows = np.flatnonzero(trains)
    rows = rows[np.argsort(numbers[rows], kind="stable")]
    buckets, from_end = np.unique(codes[rows][::-1], return_index=True)
    last = len(rows) - 1 - from_end[buckets >= 0]
    chosen = np.zeros(len(ids), bool)
    chosen[np.delete(rows, last)[: int(share * len(rows) + 0.5)]] = True
    return chosen
