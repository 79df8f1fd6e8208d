"""Which bucket fills which slot of a pass.

A pass is cut into windows of a fixed number of slots. A window's filling is a pure function of (seed, stage, pass, era,
window number, micro-batches left in each bucket when it starts, its size), so any window can be made again alone.
"""

from __future__ import annotations

import numpy as np

from longtake.random import Purpose, words

_WORDS_AT_ONCE = 1 << 20  # random words drawn in one call: many small windows share it


def fill_window(left: np.ndarray, num_slots: int, random_words: np.ndarray) -> np.ndarray:
    """The bucket of each slot of one window: int64 [num_slots].

    `left`: int64 [B], micro-batches left in each bucket, at least `num_slots` in all; `random_words`: uint32
    [num_slots + 2]. Systematic sampling: points at equal distances on the line of all micro-batches left, with one
    random offset, so each bucket gets its share of the slots rounded up or down, never more than it has; then a
    shuffle.
    """
    ends = np.cumsum(left)
    total = int(ends[-1])
    assert 0 < num_slots <= total
    offset = (int(random_words[0]) | int(random_words[1]) << 32) % total
    points = (np.arange(num_slots, dtype=np.int64) * total + offset) // num_slots
    filled = np.searchsorted(ends, points, side="right")
    return filled[np.argsort(random_words[2:], kind="stable")]


def fill_windows(
    left: np.ndarray, window_slots: int, *, seed: int, stage: int, pass_index: int, era: int, first_window: int
) -> np.ndarray:
    """The bucket of each slot from the start of `first_window` to the end of the pass: int32 [sum of `left`].

    Every window has `window_slots` slots; the last one takes what is left.
    """
    left = np.array(left, np.int64)
    total = int(left.sum())
    num_windows = -(-total // window_slots)
    out = np.empty(total, np.int32)
    block = max(1, _WORDS_AT_ONCE // (window_slots + 2))
    for first in range(0, num_windows, block):
        windows = np.arange(first, min(first + block, num_windows))
        names = np.uint64(era << 32) + (first_window + windows).astype(np.uint64)
        drawn = words(seed, stage, Purpose.MIX, pass_index, names, min(window_slots, total) + 2)
        for window, window_words in zip(windows.tolist(), drawn, strict=True):
            slots = slice(window * window_slots, min((window + 1) * window_slots, total))
            size = slots.stop - slots.start
            out[slots] = fill_window(left, size, window_words[: size + 2])
            left -= np.bincount(out[slots], minlength=len(left))
    return out
