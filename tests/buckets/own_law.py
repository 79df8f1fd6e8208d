"""A law that a family brings: random sizes, and as many frames as a budget of tokens lets them have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from longtake.buckets.assignment import register_law
from longtake.buckets.protocol import KIND, BucketDraw, BucketLaw, Columns, Timing, Unused
from longtake.contracts import Bucket


@dataclass(frozen=True)
class TokenBudget:
    """Square clips of a size drawn among those that the source has, 4k+1 frames, size^2 x frames below a budget."""

    sizes: tuple[int, ...] = (16, 32, 48)
    budget: int = 16 * 16 * 9
    share: float = 0.9  # of each clip, from its start
    stride: int = 2
    place: ClassVar[str] = "bucket_config"
    crops: ClassVar[bool] = True

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(
            Bucket(f"{size}px", frames, "1:1", (frames, size, size), max(1, 8 // frames))
            for size in self.sizes
            for frames in range(1, self.most_frames(size) + 1, 4)
        )

    @cached_property
    def shapes(self) -> np.ndarray:
        return np.array([bucket.shape for bucket in self.buckets], np.int64)

    @property
    def entries(self) -> frozenset[tuple[str, int]]:
        return frozenset((bucket.resolution, bucket.num_frames) for bucket in self.buckets)

    def most_frames(self, size: int) -> int:
        return max(0, self.budget // size**2 - 1) // 4 * 4 + 1

    def assign_chunk(self, columns: Columns, draw: BucketDraw) -> tuple[np.ndarray, np.ndarray]:
        num_frames, height, width, _ = columns
        timing = self.timing(columns, draw)
        valid = np.isfinite(num_frames + height + width)
        room = np.where(valid, (timing.stop - timing.first) // self.stride, 0)
        most = np.searchsorted(self.sizes, np.minimum(height, width), side="right")
        size = np.floor(draw(np.arange(len(most)), "size", 0, False) * most).astype(np.int64)
        caps = np.array([self.most_frames(size) for size in self.sizes])
        frames = (np.minimum(room, caps[np.minimum(size, len(caps) - 1)]) - 1) // 4 * 4 + 1
        places = {(bucket.shape[1], bucket.num_frames): index for index, bucket in enumerate(self.buckets)}
        code = np.array([places.get((self.sizes[s], f), -1) for s, f in zip(size, frames, strict=True)], np.int32)
        code = np.where(frames < 1, np.int32(Unused.TOO_SHORT), np.where(most < 1, np.int32(Unused.TOO_SMALL), code))
        return np.where(valid, code, np.int32(Unused.INVALID)).astype(np.int32), timing.interval

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        total = np.nan_to_num(columns[0])
        stop = np.where(total == 1, self.stride, total * self.share).astype(np.int64)
        interval = np.full(len(total), self.stride, np.int64)
        return Timing(np.nan_to_num(columns[3]) / self.stride, interval, np.zeros(len(total), np.int64), stop)

    def content(self) -> dict[str, Any]:
        return self.to_json()

    def to_json(self) -> dict[str, Any]:
        return {KIND: "token budget", **asdict(self), "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketLaw:
        return cls(tuple(data["sizes"]), data["budget"], data["share"], data["stride"])


register_law("token budget", TokenBudget.from_json)
