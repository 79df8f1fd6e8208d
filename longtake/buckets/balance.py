"""What a micro-batch costs, as a formula of its tokens: slots that run side by side are filled with equal cost.

Ranks wait for the slowest of them in every forward, so a rank with a cheap bucket beside one with a dear bucket is
idle for the difference. `mix` therefore fills slots that run at the same time with buckets of nearly equal cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longtake.contracts import Bucket, LatentShape, UserError


@dataclass(frozen=True)
class CostModel:
    """Predicted time of a micro-batch: batch size x (per_sample + linear L + quadratic L²), L video tokens of a sample.

    The unit is free (FLOPs, seconds): only ratios count. All are told for one sequence degree: a slot of n
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
        if self.side_by_side < 1 or self.patch < 1:
            raise ValueError("side_by_side and patch must be at least 1")

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
        """The model as plain data, kept with the state of a pass."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostModel:
        """The model that `to_json` wrote."""
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
