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

from longtake.buckets.aspect import Shape, aspect_table, closest_ratio, num_pixels
from longtake.buckets.entries import BucketConfig, Entry, read_entries
from longtake.buckets.frames import frame_interval
from longtake.contracts import Bucket
from longtake.random import Purpose, hash64, uniforms

_CHUNK = 1 << 17  # rows per sweep: its columns stay in the cache
_MIN_AREA = 0.8  # of the pixel budget: a clip may be enlarged by up to a quarter of its area


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
    compat: str | None = None  # "opensora_v2" for that program's nearest ratio and frame count of stills

    @classmethod
    def from_config(
        cls, bucket_config: BucketConfig, divisor: int, fps_max: float | None = 24, compat: str | None = None
    ) -> BucketRule:
        """A rule from `bucket_config` as a run file has it. Raises UserError where it is malformed."""
        ceiling = None if fps_max is None else float(fps_max)
        return cls(tuple(read_entries(bucket_config, divisor).items()), divisor, ceiling, compat)

    @cached_property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The resolutions in the order of the walk: largest pixel budget first, ties as written."""
        found = []
        for name, entries in self.config:
            longest_first = sorted(entries, key=lambda entry: -entry.num_frames)
            still = next((entry for entry in entries if entry.num_frames == 1), None)
            videos = tuple(entry for entry in longest_first if entry.num_frames > 1)
            found.append(Resolution(name, num_pixels(name), aspect_table(name, self.divisor), still, videos))
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

    def to_json(self) -> dict[str, Any]:
        """The rule as plain data, kept with the state of a pass."""
        config = {
            name: {str(e.num_frames): [e.keep if e.skip is None else [e.keep, e.skip], e.batch_size] for e in entries}
            for name, entries in self.config
        }
        return {"bucket_config": config, "divisor": self.divisor, "fps_max": self.fps_max, "compat": self.compat}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketRule:
        """The rule that `to_json` wrote."""
        return cls.from_config(data["bucket_config"], data["divisor"], data["fps_max"], data["compat"])


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
        out[chunk] = _assign_chunk(rule, *columns, start, draw)
    return out


def _assign_chunk(
    rule: BucketRule,
    num_frames: np.ndarray,
    height: np.ndarray,
    width: np.ndarray,
    fps: np.ndarray,
    start: int,
    draw: Draw,
) -> np.ndarray:
    """`assign` for columns that begin at row `start` of the table."""

    def draw_here(rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray:
        return draw(rows + start, resolution, num_frames, skip)

    with np.errstate(invalid="ignore"):
        valid = np.isfinite(num_frames + height + width) & (num_frames >= 1) & (height >= 1) & (width >= 1)
    code = np.where(valid, Unused.TOO_SMALL, Unused.INVALID).astype(np.int32)
    length = _training_frames(rule, np.where(valid, num_frames, 0), fps)
    area = height * width
    waiting = np.flatnonzero(valid)
    first_bucket = 0  # of the resolution, in rule.buckets
    for resolution in rule.resolutions:
        rows = waiting[area[waiting] >= _MIN_AREA * resolution.num_pixels]
        stills = length[rows] == 1
        for entry_index, taken in (
            *_walk_videos(resolution, rows[~stills], length, code, draw_here),
            *_walk_stills(resolution, rows[stills], code, draw_here),
        ):
            ratio = closest_ratio(height[taken], width[taken], resolution.ratios, rule.compat)
            code[taken] = first_bucket + entry_index * len(resolution.ratios) + ratio
        waiting = waiting[code[waiting] < 0]
        first_bucket += len(resolution.entries) * len(resolution.ratios)
    return code


def _training_frames(rule: BucketRule, num_frames: np.ndarray, fps: np.ndarray) -> np.ndarray:
    """Frames left after the frame-rate rule, int64 [N]. A still has no rate: it stays 1, except under compat."""
    frames = num_frames.astype(np.int64)
    reduced = frames // frame_interval(fps, rule.fps_max)[1]
    return reduced if rule.compat == "opensora_v2" else np.where(frames == 1, 1, reduced)


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
