"""What the order of a pass depends on, besides the pass number and the state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from longtake.buckets.mix import CostModel
from longtake.buckets.protocol import BucketLaw, Columns
from longtake.contracts import UserError
from longtake.random import Purpose, available_cores, hash64, mixed, sample_ids, uniforms

_ROWS_AT_ONCE = 1 << 20
_ODD_NUMBERS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93
_FACTORS = tuple(map(np.uint64, _ODD_NUMBERS))


@dataclass(frozen=True, eq=False)
class OrderInputs:
    """The clips, the bucket law and the settings of a run. Raises `UserError` for weights that are no weights."""

    seed: int
    stage: int
    slots_per_step: int  # G
    rule: BucketLaw
    num_frames: np.ndarray  # [N] columns of the clip table, any number type; NaN where unknown
    height: np.ndarray
    width: np.ndarray
    fps: np.ndarray
    clip_ids: np.ndarray  # uint64 [N], all different
    table: str  # fingerprint of the table's rows: equal exactly where the columns above are equal
    weights: float | np.ndarray = 1.0  # of each clip in the mix: expected number of copies per pass
    held_back: np.ndarray | None = None  # bool [N]: clips of weight 0 that validation measures, for the report
    quarantined: Mapping[int, int] = field(default_factory=dict)  # sample id -> pass in which it failed to load
    views: int = 0  # K: bucket draws use pass mod K; 0 for a new draw in every pass
    window_steps: int = 64  # the mix of buckets is proportional within windows of this many steps
    cost: CostModel | None = None  # slots that run side by side cost nearly the same; None: they are filled at random
    slot_sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    # entry of bucket_config -> micro-batches of one slot; 1 where it is not named

    def __post_init__(self) -> None:
        assert self.cost is None or self.slots_per_step % self.cost.side_by_side == 0
        weights = np.asarray(self.weights, np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise UserError("dataset: mix weights must be finite numbers of at least 0")
        if weights.size and not weights.any():
            raise UserError("dataset: every mix weight is 0; give at least one clip a weight above 0")

    @property
    def num_clips(self) -> int:
        return len(self.clip_ids)

    @property
    def columns(self) -> Columns:
        """What a bucket law reads of the clips."""
        return self.num_frames, self.height, self.width, self.fps

    @cached_property
    def micro_batches(self) -> np.ndarray:
        """Micro-batches of a slot of each bucket: int64 [B]."""
        buckets = self.rule.buckets
        return np.array([self.slot_sizes.get(bucket.entry, 1) for bucket in buckets], np.int64)

    @property
    def most_micro_batches(self) -> int:
        """The most that a step can have."""
        return self.slots_per_step * int(self.micro_batches.max(initial=1))

    @cached_property
    def clip_digests(self) -> tuple[str, str]:
        """Hashes of which clips there are, and of those with their numbers; the order of rows does not count."""
        which = what = 0
        for first in range(0, self.num_clips, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            hashes = mixed(np.asarray(self.clip_ids[rows], np.uint64))
            which += int(hashes.sum())  # wraps at 2**64, as any sum of these may
            for column, factor in zip(self.columns, _FACTORS, strict=True):
                numbers = np.nan_to_num(np.asarray(column[rows], np.float64)) + 0.0  # -0.0 becomes 0.0
                hashes = hashes + numbers.view(np.uint64) * factor
            what += int(mixed(hashes).sum())
        return f"{which % 2**64:016x}", f"{what % 2**64:016x}"

    def know_digests(self, digests: Sequence[str] | None) -> None:
        """Spares the count of `clip_digests`: those of equal inputs, where they were kept."""
        if digests:
            vars(self).setdefault("clip_digests", tuple(digests))

    def fingerprint(self, pass_index: int) -> str:
        """Return a hash of everything that, changed in the middle of a pass, begins an era."""
        if pass_index not in self._known:  # other inputs, quarantined samples too, are another object
            self._known[pass_index] = self._hash(pass_index)
        return self._known[pass_index]

    @cached_property
    def _known(self) -> dict[int, str]:
        """Fingerprints by pass."""
        return {}

    def _hash(self, pass_index: int) -> str:
        parts = [json.dumps(self.rule.to_json()), self.slots_per_step, self.window_steps, self.views, self.table]
        if self.cost is not None:
            parts.append(json.dumps(self.cost.to_json()))
        if (self.micro_batches > 1).any():
            parts.append(json.dumps(self.micro_batches.tolist()))
        weights = np.asarray(self.weights, np.float64).tobytes()
        absent = np.sort(self.quarantined_before(pass_index)).tobytes()
        return f"{hash64(*parts, self.num_clips, weights, absent):016x}"

    def quarantined_before(self, pass_index: int) -> np.ndarray:
        """uint64: the samples that failed in an earlier pass."""
        return np.array([sample for sample, failed in self.quarantined.items() if failed < pass_index], np.uint64)

    def samples(self, pass_index: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the samples of a pass: `(rows, ids)`, int64 and uint64 [S], in table order.

        A clip of weight w has floor(w) copies, and one more where a uniform number of this pass falls below the
        rest. Where every clip has exactly one copy, `rows` is None: sample i is row i.
        """
        if (np.asarray(self.weights) == 1).all():
            return None, np.asarray(self.clip_ids, np.uint64)
        starts = range(0, max(1, self.num_clips), _ROWS_AT_ONCE >> 2)
        with ThreadPoolExecutor(min(8, available_cores()), "copies") as pool:
            parts = list(pool.map(lambda start: self._copies(pass_index, start, _ROWS_AT_ONCE >> 2), starts))
        return np.concatenate([rows for rows, _ in parts]), np.concatenate([ids for _, ids in parts])

    def _copies(self, pass_index: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`samples` of `count` rows from `start` on."""
        ids = np.asarray(self.clip_ids[start : start + count], np.uint64)
        weights = np.broadcast_to(np.asarray(self.weights), (self.num_clips,))[start : start + count].astype(np.float64)
        copies = np.floor(weights).astype(np.int64)
        rest = weights - copies
        if rest.any():
            copies += uniforms(self.seed, self.stage, Purpose.COPY, pass_index, ids, 1)[:, 0] < rest
        own = np.repeat(np.arange(len(ids)), copies)
        first = np.repeat(np.cumsum(copies) - copies, copies)
        return own + start, sample_ids(ids[own], np.arange(len(own)) - first)
