"""What the order of a pass, the loader, encoding and planning ask of a bucket law, and what a law may draw on.

A law goes from the numbers of clips and draws to a bucket (size, length, batch size) and to the frames that may be used
of each clip. `assignment.BucketRule` is the one of `bucket_config`; a family may bring its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from longtake.contracts import Bucket
from longtake.random import Purpose, hash64, uniforms

Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # num_frames, height, width, fps
KIND = "law"  # key of a law's plain data that names its reader; `BucketRule`'s has none


class Unused(IntEnum):
    """Why a clip is in no bucket. Of several resolutions the reason nearest to success counts: the lowest number."""

    TOO_SMALL = -1
    TOO_SHORT = -2
    NO_STILLS = -3
    DISABLED = -4
    SKIPPED = -5
    NOT_KEPT = -6
    INVALID = -7
    QUARANTINED = -8
    NO_COPY = -9
    SEEN = -10
    HELD_BACK = -11

    @property
    def sentence(self) -> str:
        """The reason in words, for reports."""
        return _SENTENCES[self]


_SENTENCES = {
    Unused.TOO_SMALL: "smaller than 80 % of the area of every resolution",
    Unused.TOO_SHORT: "fewer frames (at the training frame rate) than the shortest length it could take",
    Unused.NO_STILLS: "a still, and no resolution that it is large enough for has length 1",
    Unused.DISABLED: "fits only entries with keep probability 0 or skip probability 1",
    Unused.SKIPPED: "passed over by the skip draws of this pass",
    Unused.NOT_KEPT: "not kept by the keep draws of this pass",
    Unused.INVALID: "number of frames, height or width missing or below 1",
    Unused.QUARANTINED: "in quarantine: it failed to load in an earlier pass",
    Unused.NO_COPY: "given no copy in this pass by its weight in the mix",
    Unused.SEEN: "passed earlier in this pass, under other settings",
    Unused.HELD_BACK: "held back for validation",
}


class BucketDraw(Protocol):
    """A source of the uniform numbers that assignment asks for, at most once per row, entry and kind.

    `rows`: int64 [n], positions in the columns given to `assign`; `skip` tells the skip draw of an entry from its keep
    draw (asked later). Returns float [n] in [0, 1).
    """

    def __call__(self, rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray: ...


def view_of(pass_index: int, views: int) -> int:
    """Return the pass that the draws of buckets and pixels use: `pass mod views`, or the pass itself where `views` is
    0."""
    return pass_index % views if views else pass_index


def keyed_draw(seed: int, stage: int, pass_index: int, samples: np.ndarray) -> BucketDraw:
    """Return the draws of a run: functions of (seed, stage, pass, sample, resolution, length, kind) and of nothing
    else.

    `samples`: uint64 [N], sample ids of the rows. The entry enters the counter through its hash, so no decision of a
    sample changes when other entries come, go or change.
    """

    def draw(rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray:
        mixed = samples[rows] ^ np.uint64(hash64("bucket", resolution, num_frames))
        return uniforms(seed, stage, Purpose.BUCKET, pass_index, mixed, 2)[:, int(skip)]

    return draw


@dataclass(frozen=True)
class Timing:
    """Which source frames of some clips may be used, and how densely; arrays [N]."""

    rate: np.ndarray  # float64, frames per second that a sample has, 0 where unknown
    interval: np.ndarray  # int64, source frames for one training frame
    first: np.ndarray  # int64, the first source frame that may be used
    stop: np.ndarray  # int64, one past the last


class BucketLaw(Protocol):
    """Which bucket a clip falls into, and which of its frames a sample takes. Equal laws make equal assignments.

    A law is a pure function of the columns and the draws of each clip by itself. Frozen, hashable or not; picklable.
    """

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All there are, in an order of the law's own."""

    @property
    def shapes(self) -> np.ndarray:
        """int64 [B, 3]: (T, H, W) of `buckets`."""

    @property
    def place(self) -> str:
        """The key of a run's config that says it, for sentences."""

    @property
    def crops(self) -> bool:
        """Whether pictures that cover a bucket's shape are cut to it; False: they are scaled to it, nothing is cut."""

    @property
    def entries(self) -> frozenset[tuple[str, int]]:
        """(resolution, frames) of the buckets that clips can take."""

    def assign_chunk(self, columns: Columns, draw: BucketDraw) -> tuple[np.ndarray, np.ndarray]:
        """`(code, interval)`, int32 and int64 [N], of float64 columns [N] that fit the cache, NaN where unknown.

        code: a position in `buckets`, or an `Unused` reason; interval: source frames for one training frame.
        """

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        """Which frames of clips that have a bucket may be used; `draw` gives what it gave when they were assigned."""

    def content(self) -> dict[str, Any]:
        """What decides which bucket, and which frames, a sample has, by readable names; batch sizes are left out."""

    def to_json(self) -> dict[str, Any]:
        """Return the law as plain data, kept with the state of a pass; under `KIND` the name of its reader."""
