"""Which bucket a clip falls into: the rule, its application to whole columns, and how densely clips are read.

The walk is that of Open-Sora 2.0: resolutions from the largest pixel budget down, lengths from the longest down, a
keep draw (and a skip draw where an entry has one), then the nearest aspect ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longtake.buckets.aspect import aspect_table, closest_ratio, num_pixels, ratio_weights
from longtake.buckets.entries import BucketConfig, Entry, read_entries
from longtake.buckets.laws import LAWS, Shape, WalkLaw
from longtake.buckets.protocol import KIND, BucketDraw, BucketLaw, Columns, Timing, Unused
from longtake.contracts import Bucket, UserError

_CHUNK = 1 << 17  # rows per sweep: its columns stay in the cache


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
    """The law of `bucket_config`. Equal rules make equal assignments."""

    config: tuple[tuple[str, tuple[Entry, ...]], ...]  # (resolution name, entries) in the order written
    divisor: int  # H and W are multiples of it: spatial compression x patch size
    fps_max: float | None = 24  # ceiling of the frame rate, None for none
    law: str | None = None  # a key of `laws.LAWS`: that system's tables and ways
    frame_interval: int | None = None  # every n-th source frame is read, whatever the rate; None: as the law has it

    place, crops = "bucket_config", True

    @classmethod
    def from_config(
        cls,
        bucket_config: BucketConfig,
        divisor: int,
        fps_max: float | None = 24,
        law: str | None = None,
        frame_interval: int | None = None,
    ) -> BucketRule:
        """Return a rule from `bucket_config` as a run file has it. Raises UserError where it is malformed."""
        ceiling = None if fps_max is None else float(fps_max)
        entries = read_entries(bucket_config, divisor, law=law)
        return cls(tuple(entries.items()), divisor, ceiling, law, frame_interval)

    @property
    def walk(self) -> WalkLaw:
        """The ways of the system that the rule follows."""
        return LAWS[self.law]

    @property
    def stride(self) -> int | None:
        """Every n-th source frame is read; None: by the frame rate."""
        return 1 if self.walk.fixed_interval and self.frame_interval is None else self.frame_interval

    @cached_property
    def resolutions(self) -> tuple[Resolution, ...]:
        """The resolutions in the order of the walk: largest pixel budget first, ties as written."""
        found = []
        for name, entries in self.config:
            longest_first = sorted(entries, key=lambda entry: -entry.num_frames)
            still = next((entry for entry in entries if entry.num_frames == 1), None)
            videos = tuple(entry for entry in longest_first if entry.num_frames > 1)
            ratios = aspect_table(name, self.divisor, law=self.law)
            weights = ratio_weights(name, self.law)
            found.append(Resolution(name, num_pixels(name, self.law), ratios, still, videos, weights))
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

    @cached_property
    def entries(self) -> frozenset[tuple[str, int]]:
        """(resolution, frames) of the entries that clips can take."""
        return frozenset(
            (resolution.name, entry.num_frames)
            for resolution in self.resolutions
            for entry in resolution.entries
            if entry.reachable
        )

    def assign_chunk(self, columns: Columns, draw: BucketDraw) -> tuple[np.ndarray, np.ndarray]:
        """Return the walk of clips in a chunk that fits the cache: `(code, interval)`."""
        return _walk_all(self, *columns, draw)

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        """Return the whole of each clip, at the stride of the frame-rate rule."""
        num_frames, fps = columns[0], columns[3]
        rate, interval = frame_interval(fps, self.fps_max, self.stride)
        return Timing(rate, interval, np.zeros(len(interval), np.int64), np.asarray(num_frames).astype(np.int64))

    def content(self) -> dict[str, Any]:
        """What decides which bucket, and which frames, a sample has; batch sizes are left out."""
        data = self.to_json()
        entries = {name: {t: keep for t, (keep, _) in of.items()} for name, of in data["bucket_config"].items()}
        return {"bucket_config": entries, "size_divisor": self.divisor, "frame_interval": data.get("frame_interval", 1)}

    def to_json(self) -> dict[str, Any]:
        """Return the rule as plain data, kept with the state of a pass."""
        config = {
            name: {str(e.num_frames): [e.keep if e.skip is None else [e.keep, e.skip], e.batch_size] for e in entries}
            for name, entries in self.config
        }
        data = {"bucket_config": config, "divisor": self.divisor, "fps_max": self.fps_max, "compat": self.law}
        is_usual = self.stride == 1 if self.walk.fixed_interval else self.stride is None
        return data if is_usual else data | {"frame_interval": self.stride}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketRule:
        """Return the rule that `to_json` wrote; its second probabilities are of skipping, whatever the law."""
        config = tuple(
            (
                name,
                tuple(Entry(int(t), *(p if isinstance(p, list) else (p, None)), size) for t, (p, size) in of.items()),
            )
            for name, of in data["bucket_config"].items()
        )
        return cls(config, data["divisor"], data["fps_max"], data["compat"], data.get("frame_interval"))


_READERS: dict[str, Callable[[Mapping[str, Any]], BucketLaw]] = {}  # of other laws than `BucketRule`


def register_law(kind: str, read: Callable[[Mapping[str, Any]], BucketLaw]) -> None:
    """From now on plain data with that `KIND` are read by `read`."""
    _READERS[kind] = read


def read_law(data: Mapping[str, Any]) -> BucketLaw:
    """Return the law that `to_json` wrote. Raises `UserError` for a kind that nobody has registered."""
    if KIND not in data:
        try:
            return BucketRule.from_json(data)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"bucket rule of a checkpoint: cannot be read ({error!r}); choose another one") from error
    if data[KIND] not in _READERS:
        known = ", ".join(_READERS) or "none"
        raise UserError(
            f"order state: it was written under the bucket law {data[KIND]!r}, and the laws of this run's model are "
            f"{known}; resume with the model that began the pass, or deal it anew with --start-epoch"
        )
    return _READERS[data[KIND]](data)


def assign(
    rule: BucketLaw, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, fps: np.ndarray, draw: BucketDraw
) -> np.ndarray:
    """Return the bucket of each clip: int32 [N], a position in `rule.buckets`, or an `Unused` reason (negative).

    The columns are numbers of any type, [N]; missing values are NaN. `fps` may be NaN (unknown: the clip is taken
    frame by frame).
    """
    out = np.empty(len(num_frames), np.int32)
    for start in range(0, len(out), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        columns = tuple(np.asarray(column[chunk], np.float64) for column in (num_frames, height, width, fps))

        def draw_here(rows: np.ndarray, resolution: str, num_frames: int, skip: bool, start: int = start) -> np.ndarray:
            return draw(rows + start, resolution, num_frames, skip)

        out[chunk] = rule.assign_chunk(columns, draw_here)[0]
    return out


def frame_interval(fps: ArrayLike, fps_max: float | None, stride: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Stride and resulting rate of clips under a frame-rate ceiling; or at a `stride` that is given, whatever the rate.

    A clip faster than the ceiling is read with a whole-number stride, so that no frame is ever blended.
    `fps`: frames per second, any shape; `fps_max`: the ceiling, or None for none. Returns `(new_fps, interval)`,
    float64 and int64 of the shape of `fps`:

    - unknown (NaN, infinite, zero or negative): `(0, 1)`;
    - up to the ceiling: `(fps, 1)`;
    - above: `interval = ceil(fps / fps_max)`, `new_fps = floor(fps / interval)`, e.g. 29.97 under 24 -> `(14, 2)`.
    """
    rate = np.asarray(fps, dtype=np.float64)
    known = np.isfinite(rate) & (rate > 0)
    rate = np.where(known, rate, 0.0)
    if stride is not None:
        return rate / stride, np.full(rate.shape, stride, np.int64)
    if fps_max is None:
        return rate, np.ones(rate.shape, np.int64)
    interval = np.maximum(np.ceil(rate / fps_max), 1.0)
    new_fps = np.where(rate <= fps_max, rate, np.floor(rate / interval))
    return new_fps, interval.astype(np.int64)


def _walk_all(
    rule: BucketRule, num_frames: np.ndarray, height: np.ndarray, width: np.ndarray, fps: np.ndarray, draw: BucketDraw
) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore"):
        valid = np.isfinite(num_frames + height + width) & (num_frames >= 1) & (height >= 1) & (width >= 1)
    code = np.where(valid, Unused.TOO_SMALL, Unused.INVALID).astype(np.int32)
    length, interval = _training_frames(rule, np.where(valid, num_frames, 0), fps)
    area = height * width
    waiting = np.flatnonzero(valid)
    first_bucket = 0  # of the resolution, in rule.buckets
    for resolution in rule.resolutions:
        rows = waiting[area[waiting] >= rule.walk.min_area * resolution.num_pixels]
        stills = length[rows] == 1
        found = [*_walk_videos(resolution, rows[~stills], length, code, draw)]
        if resolution.still is None:
            _blame(code, rows[stills], Unused.NO_STILLS)
        else:
            kept = _kept(resolution.name, resolution.still, rows[stills], code, draw)
            found.append((len(resolution.videos), kept))
        taken = np.concatenate([rows[:0], *(kept for _, kept in found)])
        sizes = np.array([len(kept) for _, kept in found], np.int64)
        entries = np.repeat(np.array([index for index, _ in found], np.int32), sizes)
        if resolution.weights is None:
            ratio = closest_ratio(height[taken], width[taken], resolution.ratios, rule.law)
        else:
            drawn = draw(taken, f"{resolution.name}/ratio", 0, False)
            ratio = np.searchsorted(np.cumsum(resolution.weights)[:-1], drawn, side="right")
        code[taken] = first_bucket + entries * len(resolution.ratios) + ratio
        waiting = waiting[code[waiting] < 0]
        first_bucket += len(resolution.entries) * len(resolution.ratios)
    return code, interval


def _training_frames(rule: BucketRule, num_frames: np.ndarray, fps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frames left after the frame-rate rule, and its interval: int64 [N] each.

    A still has no rate: it stays 1, except under Open-Sora 2.0's law. At a stride that is given only a still has one
    frame: a clip too short for any other length has 0.
    """
    walk, frames = rule.walk, num_frames.astype(np.int64)
    interval = frame_interval(fps, rule.fps_max, rule.stride)[1]
    if rule.stride is not None:
        reduced = (frames - 1 if walk.longer else frames) // interval
        return np.where(frames == 1, 1, np.where(reduced == 1, 0, reduced)), interval
    reduced = frames // interval
    return reduced if walk.stills_have_rate else np.where(frames == 1, 1, reduced), interval


def _walk_videos(
    resolution: Resolution, rows: np.ndarray, length: np.ndarray, code: np.ndarray, draw: BucketDraw
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


def _kept(name: str, entry: Entry, rows: np.ndarray, code: np.ndarray, draw: BucketDraw) -> np.ndarray:
    kept = _happens(entry.keep, rows, name, entry, False, draw)
    _blame(code, rows[~kept], Unused.DISABLED if entry.keep <= 0 else Unused.NOT_KEPT)
    return rows[kept]


def _happens(probability: float, rows: np.ndarray, name: str, entry: Entry, skip: bool, draw: BucketDraw) -> np.ndarray:
    """Whether an event of the given probability happens to each row: bool [n]. Certain ones need no draw."""
    if probability <= 0 or probability >= 1 or not len(rows):
        return np.full(len(rows), probability >= 1)
    return draw(rows, name, entry.num_frames, skip) < probability


def _blame(code: np.ndarray, rows: np.ndarray, reason: Unused) -> None:
    """Keep the reason nearest to success, which is the lowest number."""
    code[rows] = np.minimum(code[rows], reason)
