"""What a micro-batch costs, and which bucket fills which slot of a pass.

Ranks wait for the slowest of them in every forward, so slots that run at the same time are filled with buckets of
nearly equal cost. A pass is cut into windows of a fixed number of slots. A window's filling is a pure function of
(seed, stage, pass, era, window number, micro-batches left in each bucket when it starts, its size, cost constants), so
any window can be made again alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longtake.contracts import Bucket, LatentShape, UserError
from longtake.random import Purpose, words

_WORDS_AT_ONCE = 1 << 20  # random words drawn in one call: many small windows share it


@dataclass(frozen=True)
class CostModel:
    """Predicted time of a micro-batch: batch size x (per_sample + linear L + quadratic L²), L video tokens of a sample.

    The unit is free (FLOPs, seconds): only ratios count. All are of one sequence degree: a slot of n
    micro-batches side by side, each on 1/n of the ranks, costs n times one of them. The constants belong to the run:
    they are kept with the state, and other ones begin an era.
    """

    per_sample: float
    linear: float
    quadratic: float
    latent: LatentShape  # pixels to latents
    patch: int  # side of a token in latents
    side_by_side: int  # slots that run at the same time: the data ranks of the first launch; divides G

    def __post_init__(self) -> None:
        constants = (self.per_sample, self.linear, self.quadratic)
        if not (np.isfinite(constants).all() and min(constants) >= 0 and max(constants) > 0):
            raise UserError(f"cost constants {constants}: numbers of at least 0 are expected, and one above 0")

    def tokens(self, shape: tuple[int, int, int]) -> int:
        """Video tokens of one sample of (T, H, W) pixels."""
        _, frames, height, width = self.latent(*shape)
        return frames * -(-height // self.patch) * -(-width // self.patch)

    def cost(self, bucket: Bucket) -> float:
        """Cost of a micro-batch of a bucket."""
        tokens = self.tokens(bucket.shape)
        return bucket.batch_size * (self.per_sample + self.linear * tokens + self.quadratic * tokens**2)

    def costs(self, buckets: Sequence[Bucket]) -> np.ndarray:
        """Cost of a micro-batch of each bucket: float64 [B]."""
        return np.array([self.cost(bucket) for bucket in buckets], np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the model as plain data, kept with the state of a pass."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostModel:
        """Return the model that `to_json` wrote."""
        return cls(**{**data, "latent": LatentShape(**data["latent"])})


def fit_cost(tokens: Sequence[float], costs: Sequence[float]) -> tuple[float, float, float]:
    """`(per_sample, linear, quadratic)` that come nearest to the measured costs of samples of so many tokens.

    `costs`: of one sample, in any unit (a micro-batch's time divided by its batch size); at least three different
    `tokens`. Least squares on the relative error, so that small and large samples count alike; no constant falls below
    0. Raises UserError with fewer than three sizes.
    """
    length, cost = np.asarray(tokens, np.float64), np.asarray(costs, np.float64)
    if len(np.unique(length)) < 3 or not (cost > 0).all():
        raise UserError(
            f"cost model: {len(np.unique(length))} sizes were measured; give costs above 0 of at least three"
        )
    scale = length.max()  # keeps the columns of like size
    columns = np.stack([np.ones_like(length), length / scale, (length / scale) ** 2], axis=1) / cost[:, None]
    best, least = np.zeros(3), np.inf
    for kept in ([0, 1, 2], [1, 2], [0, 2], [0, 1], [2], [1], [0]):  # the best of all faces of the positive cone
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(columns[:, kept], np.ones_like(cost), rcond=None)[0]
        error = float(((columns @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return float(best[0]), float(best[1] / scale), float(best[2] / scale**2)


def fill_window(left: np.ndarray, num_slots: int, random_words: np.ndarray) -> np.ndarray:
    """Return the bucket of each slot of one window: int64 [num_slots].

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


def balance_window(filled: np.ndarray, costs: np.ndarray, side_by_side: int, random_words: np.ndarray) -> np.ndarray:
    """Return the slots of one window, rearranged so that those which run side by side cost nearly the same: int64
    [num_slots].

    `filled`: their buckets, shuffled; `costs`: float64 [B] of a micro-batch of each bucket; `random_words`: uint32
    [num_slots // side_by_side]. Slots are sorted by cost and cut into groups of `side_by_side`, which are shuffled. The
    slots left over, which only the last window has, are the cheapest and come last.
    """
    num_groups, num_over = divmod(len(filled), side_by_side)
    ascending = filled[np.argsort(costs[filled], kind="stable")]
    groups = ascending[num_over:].reshape(num_groups, side_by_side)
    shuffled = groups[np.argsort(random_words[:num_groups], kind="stable")]
    return np.concatenate([shuffled.ravel(), ascending[:num_over]])


def fill_windows(
    left: np.ndarray,
    window_slots: int,
    *,
    seed: int,
    stage: int,
    pass_index: int,
    era: int,
    first_window: int,
    costs: np.ndarray | None = None,
    side_by_side: int = 1,
) -> np.ndarray:
    """Return the bucket of each slot from the start of `first_window` to the end of the pass: int32 [sum of `left`].

    Every window has `window_slots` slots; the last one takes what is left. `costs`: float64 [B] of a micro-batch of
    each bucket, None for slots in random order; `side_by_side` divides `window_slots`.
    """
    left = np.array(left, np.int64)
    total = int(left.sum())
    num_windows = -(-total // window_slots)
    out = np.empty(total, np.int32)
    num_words = min(window_slots, total) + 2  # of a filling, at most
    num_balanced = 0 if costs is None or side_by_side == 1 else num_words // side_by_side
    block = max(1, _WORDS_AT_ONCE // (num_words + num_balanced))
    for first in range(0, num_windows, block):
        windows = np.arange(first, min(first + block, num_windows))
        names = np.uint64(era << 32) + (first_window + windows).astype(np.uint64)
        drawn = words(seed, stage, Purpose.MIX, pass_index, names, num_words + num_balanced)
        for window, window_words in zip(windows.tolist(), drawn, strict=True):
            slots = slice(window * window_slots, min((window + 1) * window_slots, total))
            size = slots.stop - slots.start
            filled = fill_window(left, size, window_words[: size + 2])
            left -= np.bincount(filled, minlength=len(left))
            if num_balanced:
                # the words behind those of the filling: where they begin must not depend on what is left of the pass
                filled = balance_window(filled, costs, side_by_side, window_words[size + 2 :])
            out[slots] = filled
    return out
