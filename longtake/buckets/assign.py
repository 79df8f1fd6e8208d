"""Which bucket a clip falls into: the rule, and its application to whole columns.

The walk is that of Open-Sora 2.0: resolutions from the largest pixel budget down, lengths from the longest down, a
keep draw (and a skip draw where an entry has one), then the nearest aspect ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from longtake.buckets.aspect import aspect_table, closest_ratio, num_pixels, ratio_weights
from longtake.buckets.entries import BucketConfig, Entry, read_entries
from longtake.buckets.frames import frame_interval
from longtake.buckets.laws import LAWS, BucketLaw, Shape
from longtake.contracts import Bucket
from longtake.random import Purpose, hash64, uniforms

_CHUNK = 1 << 17  # rows per sweep: its columns stay in the cache


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
}


class Draw(Protocol):
    """A source of the uniform numbers that assignment asks for, at most once per row, entry and kind.

    `rows`: int64 [n], positions in the columns given to `assign`; `skip` tells the skip draw of an entry from its keep
    draw (asked later). Returns float [n] in [0, 1).
    """

    def __call__(self, rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray: ...


def keyed_draw(seed: int, stage: int, pass_index: int, samples: np.ndarray) -> Draw:
    """The draws of a run: functions of (seed, stage, pass, sample, resolution, length, kind) and of nothing else.

    `samples`: uint64 [N], sample ids of the rows. The entry enters the counter through its hash, so no decision of a
    sample changes when other entries come, go or change.
    """

    def draw(rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray:
        mixed = samples[rows] ^ np.uint64(hash64("bucket", resolution, num_frames))
        return uniforms(seed, stage, Purpose.BUCKET, pass_index, mixed, 2)[:, int(skip)]

    return draw


@dataclass(frozen=True)
class Resolution:
    """One resolution of a rule, ready to be walked."""

    name: str
    num_pixels: int
    ratios: dict[str, Shape]  # ratio name -> (H, W)
    still: Entry | None
    videos: tuple[Entry, ...]  # longest first
    weights: np.ndarray | None  # float64 [ratios], where a clip's ratio is drawn; None: the nearest

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, longest first."""
        return self.videos + ((self.still,) if self.still else ())


@dataclass(frozen=True)
class BucketRule:
    """Everything that decides which bucket a clip falls into. Equal rules make equal assignments."""

    config: tuple[tuple[str, tuple[Entry, ...]], ...]  # (resolution name, entries) in the order written
    divisor: int  # H and W are multiples of it: spatial compression x patch size
    fps_max: float | None = 24  # ceiling of the frame rate, None for none
    compat: str | None = None  # a key of `laws.LAWS`: that system's tables and ways
    frame_interval: int = 1  # source frames for one training frame, under a law in which the frame rate does not count

    @classmethod
    def from_config(
        cls,
        bucket_config: BucketConfig,
        divisor: int,
        fps_max: float | None = 24,
        compat: str | None = None,
        frame_interval: int = 1,
    ) -> BucketRule:
        """A rule from `bucket_config` as a run file has it. Raises UserError where it is malformed."""
        ceiling = None if fps_max is None else float(fps_max)
        entries = read_entries(bucket_config, divisor, compat=compat)
        return cls(tuple(entries.items()), divisor, ceiling, compat, frame_interval)

    @property
    def law(self) -> BucketLaw:
        """The ways of the system that the rule follows."""
        return LAWS[self.compat]

    @cached_property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The resolutions in the order of the walk: largest pixel budget first, ties as written."""
        found = []
        for name, entries in self.config:
            longest_first = sorted(entries, key=lambda entry: -entry.num_frames)
            still = next((entry for entry in entries if entry.num_frames == 1), None)
            videos = tuple(entry for entry in longest_first if entry.num_frames > 1)
            ratios = aspect_table(name, self.divisor, compat=self.compat)
            weights = ratio_weights(name, self.compat)
            found.append(Resolution(name, num_pixels(name, self.compat), ratios, still, videos, weights))
        return tuple(sorted(found, key=lambda resolution: -resolution.num_pixels))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, by resolution in walk order, then length from the longest, then ratio as in the table."""
        return tuple(
            Bucket(resolution.name, entry.num_frames, ratio, (entry.num_frames, *shape), entry.batch_size)
            for resolution in self.resolutions
            for entry in resolution.entries
            for ratio, shape in resolution.ratios.items()
        )

    @cached_property
    def shapes(self) -> np.ndarray:
        """int64 [B, 3]: (T, H, W) of `buckets`."""
        return np.array([bucket.shape for bucket in self.buckets], np.int64).reshape(-1, 3)

    def to_json(self) -> dict[str, Any]:
        """The rule as plain data, kept with the state of a pass."""
        config = {
            name: {str(e.num_frames): [e.keep if e.skip is None else [e.keep, e.skip], e.batch_size] for e in entries}
            for name, entries in self.config
        }
        data = {"bucket_config": config, "divisor": self.divisor, "fps_max": self.fps_max, "compat": self.compat}
        return data if self.frame_interval == 1 else data | {"frame_interval": self.frame_interval}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketRule:
        """The rule that `to_json` wrote; its second probabilities are of skipping, whatever the law."""
        config = tuple(
            (
                name,
                tuple(Entry(int(t), *(p if isinstance(p, list) else (p, None)), size) for t, (p, size) in of.items()),
            )
            for name, of in data["bucket_config"].items()
        )
        return cls(config, data["divisor"], data["fps_max"], data["compat"], data.get("frame_interval", 1))


def assign(
    rule: BucketRule, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, fps: np.ndarray, draw: Draw
) -> np.ndarray:
    """The bucket of each clip: int32 [N], a position in `rule.buckets`, or an `Unused` reason (negative).

    The columns are numbers of any type, [N]; missing values are NaN. `fps` may be NaN (unknown: the clip is taken
    frame by frame).
    """
    out = np.empty(len(num_frames), np.int32)
    for start in range(0, len(out), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        columns = (np.asarray(column[chunk], np.float64) for column in (num_frames, height, width, fps))

        def draw_here(rows: np.ndarray, resolution: str, num_frames: int, skip: bool, start: int = start) -> np.ndarray:
            return draw(rows + start, resolution, num_frames, skip)

        out[chunk] = assign_chunk(rule, *columns, draw_here)[0]
    return out


def assign_chunk(
    rule: BucketRule, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, fps: np.ndarray, draw: Draw
) -> tuple[np.ndarray, np.ndarray]:
    """`assign` for float64 columns of a size that fits the cache: `(code, interval)`, int32 and int64 [N].

    `interval`: source frames that one training frame stands for.
    """
    with np.errstate(invalid="ignore"):
        valid = np.isfinite(num_frames + height + width) & (num_frames >= 1) & (height >= 1) & (width >= 1)
    code = np.where(valid, Unused.TOO_SMALL, Unused.INVALID).astype(np.int32)
    length, interval = _training_frames(rule, np.where(valid, num_frames, 0), fps)
    area = height * width
    waiting = np.flatnonzero(valid)
    first_bucket = 0  # of the resolution, in rule.buckets
    for resolution in rule.resolutions:
        rows = waiting[area[waiting] >= rule.law.min_area * resolution.num_pixels]
        stills = length[rows] == 1
        found = [
            *_walk_videos(resolution, rows[~stills], length, code, draw),
            *_walk_stills(resolution, rows[stills], code, draw),
        ]
        taken = np.concatenate([rows[:0], *(kept for _, kept in found)])
        sizes = np.array([len(kept) for _, kept in found], np.int64)
        entries = np.repeat(np.array([index for index, _ in found], np.int32), sizes)
        if resolution.weights is None:
            ratio = closest_ratio(height[taken], width[taken], resolution.ratios, rule.compat)
        else:
            drawn = draw(taken, f"{resolution.name}/ratio", 0, False)
            ratio = np.searchsorted(np.cumsum(resolution.weights)[:-1], drawn, side="right")
        code[taken] = first_bucket + entries * len(resolution.ratios) + ratio
        waiting = waiting[code[waiting] < 0]
        first_bucket += len(resolution.entries) * len(resolution.ratios)
    return code, interval


def _training_frames(rule: BucketRule, num_frames: np.ndarray, fps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frames left after the frame-rate rule, and its interval: int64 [N] each.

    A still has no rate: it stays 1, except under Open-Sora 2.0's law. Under a law with a fixed interval only a still
    has one frame: a clip too short for any other length has 0.
    """
    law, frames = rule.law, num_frames.astype(np.int64)
    if law.fixed_interval:
        interval = np.full(len(frames), rule.frame_interval, np.int64)
        reduced = (frames - 1 if law.longer else frames) // rule.frame_interval
        return np.where(frames == 1, 1, np.where(reduced == 1, 0, reduced)), interval
    interval = frame_interval(fps, rule.fps_max)[1]
    reduced = frames // interval
    return reduced if law.stills_have_rate else np.where(frames == 1, 1, reduced), interval


def _walk_stills(
    resolution: Resolution, rows: np.ndarray, code: np.ndarray, draw: Draw
) -> Iterator[tuple[int, np.ndarray]]:
    """Stills of one resolution: yields (entry index, rows that take it) and writes the others' reason into `code`."""
    if not len(rows):
        return
    if resolution.still is None:
        _blame(code, rows, Unused.NO_STILLS)
        return
    yield len(resolution.videos), _kept(resolution.name, resolution.still, rows, code, draw)


def _walk_videos(
    resolution: Resolution, rows: np.ndarray, length: np.ndarray, code: np.ndarray, draw: Draw
) -> Iterator[tuple[int, np.ndarray]]:
    """Videos of one resolution: yields (entry index, rows that take it) and writes the others' reason into `code`."""
    entries = resolution.videos
    ascending = np.array([entry.num_frames for entry in reversed(entries)])
    # The first entry that a clip is long enough for; len(entries) where it is too short for all.
    level = (len(entries) - np.searchsorted(ascending, length[rows], side="right")).astype(np.int16)
    order = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[order], np.arange(len(entries) + 2))
    _blame(code, rows[order[bounds[-2] :]], Unused.TOO_SHORT)
    passed_on = rows[:0]
    for index, entry in enumerate(entries):
        here = np.concatenate([rows[order[bounds[index] : bounds[index + 1]]], passed_on])
        passed_on = here[:0]
        if not len(here):
            continue
        if entry.skip is not None:
            skipped = _happens(entry.skip, here, resolution.name, entry, True, draw)
            passed_on, here = here[skipped], here[~skipped]
            _blame(code, passed_on, Unused.DISABLED if entry.skip >= 1 else Unused.SKIPPED)
        yield index, _kept(resolution.name, entry, here, code, draw)


def _kept(name: str, entry: Entry, rows: np.ndarray, code: np.ndarray, draw: Draw) -> np.ndarray:
    """The rows that an entry keeps."""
    kept = _happens(entry.keep, rows, name, entry, False, draw)
    _blame(code, rows[~kept], Unused.DISABLED if entry.keep <= 0 else Unused.NOT_KEPT)
    return rows[kept]


def _happens(probability: float, rows: np.ndarray, name: str, entry: Entry, skip: bool, draw: Draw) -> np.ndarray:
    """Whether an event of the given probability happens to each row: bool [n]. Certain ones need no draw."""
    if probability <= 0 or probability >= 1 or not len(rows):
        return np.full(len(rows), probability >= 1)
    return draw(rows, name, entry.num_frames, skip) < probability


def _blame(code: np.ndarray, rows: np.ndarray, reason: Unused) -> None:
    """Keep the reason nearest to success, which is the lowest number."""
    code[rows] = np.minimum(code[rows], reason)
