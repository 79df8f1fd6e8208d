"""The bucket law of CogVideoX-Fun's data modes: sizes and lengths that each clip draws, and as many frames as a budget
of tokens lets it have.

A clip's side, a still's apart from a video's, is one of a few; its aspect ratio is that of the table (`buckets.laws`)
whose key is nearest; its length is the longest of the form 4k + 1 that the clip, the side and the draws allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from longtake.buckets.aspect import closest_ratio
from longtake.buckets.laws import COGVIDEOX_FUN
from longtake.buckets.protocol import KIND, BucketDraw, Columns, Timing, Unused
from longtake.contracts import Bucket, UserError
from longtake.families.cogvideox_sizes import COLLATE, KIND_OF_LAW, FunSizes

STEP = 4  # frames of a latent frame: lengths are 4k + 1
BASE = 512  # the side that the tables are written for
_MOST_KEPT = 0.75  # probability of the size that is not scaled down
_WHOLE_LENGTH = 0.9  # probability of the longest length under random_frame_crop
_ENLARGED = 1.25  # a video may be enlarged less than this much by a size that is drawn with its length
_TOKEN_STEP, _LEAST_TOKENS = 128, 256  # sizes that budgets and lengths go up in


def scale_downs(size: float, extra: tuple[float, ...] = ()) -> dict[float, float]:
    """By how much a size is divided, and with which probability (`random_hw_adapt`)."""
    if size < BASE:
        return {1.0: 1.0}
    steps = ((768, (1.25, 1.5)), (1024, (2.0,)), (1536, (2.5, 3.0)))
    ratios = [1.0, *(ratio for least, more in steps if size >= least for ratio in more), *extra]
    found = {1.0: _MOST_KEPT if len(ratios) > 1 else 1.0}
    for ratio in ratios[1:]:
        found[ratio] = found.get(ratio, 0.0) + (1 - _MOST_KEPT) / (len(ratios) - 1)
    return found


def token_sizes(video: int, image: int) -> tuple[int, ...]:
    """Return the sizes of videos whose length follows from their tokens, ascending."""
    return tuple(dict.fromkeys((*range(video, image + 1, _TOKEN_STEP), image)))


def frames_of_tokens(size: float, token_size: int, most: int, collate: bool = False) -> int:
    """Return the length of a square video of `size` with no more pixels than `most` frames of `token_size` have.

    `collate`: as the published program's loader rounds it, which can give more.
    """
    frames = min(most * token_size**2 / size**2, most)
    return int(frames // 4 * 4 + 1) if collate else max(1, int((frames - 1) // 4 * 4 + 1))


@dataclass(frozen=True, eq=False)
class Side:
    """One size: its shape in every aspect ratio, and the longest length of a video there."""

    name: str
    size: float
    shapes: np.ndarray  # int64 [R, 2]
    longest: np.ndarray  # int64 [R], 1 where stills alone are that large


@dataclass(frozen=True)
class FunLaw:
    """The law of a `sizes` section."""

    sizes: FunSizes
    divisor: int  # heights and widths are multiples of it
    lengths: tuple[tuple[int, int], ...]  # frames that a sample may have, ascending, and the tokens of each in time
    collate: bool = False  # lengths are rounded as the published program's loader does

    place: ClassVar[str] = "sizes"

    @property
    def crops(self) -> bool:
        """Whether pictures are cut to a bucket's shape."""
        return self.sizes.crop == "cover"

    @cached_property
    def _stills(self) -> dict[float, float]:
        """Sizes of stills and their probabilities."""
        size, video_size = self.sizes.image_sample_size, self.sizes.video_sample_size
        if not self.sizes.random_hw_adapt:
            return {float(size): 1.0}
        to_video = size / video_size
        # size / (size / video_size) can miss video_size by a rounding: 576 / (576 / 448) < 448
        return {
            float(video_size) if ratio == to_video else size / ratio: probability
            for ratio, probability in scale_downs(size, (to_video,)).items()
        }

    @cached_property
    def _videos(self) -> dict[float, float]:
        """The same of videos; of those whose length follows from their tokens, ascending, all alike."""
        size = self.sizes.video_sample_size
        if not self.sizes.random_hw_adapt:
            return {float(size): 1.0}
        if self.sizes.training_with_video_token_length:
            sizes = token_sizes(size, self.sizes.image_sample_size)
            return {float(size): 1 / len(sizes) for size in sizes}
        return {size / r: p for r, p in scale_downs(size).items()}

    @cached_property
    def _ratios(self) -> dict[str, tuple[int, int]]:
        """The aspect ratios, by height over width, with their shapes at 512."""
        if not self.sizes.enable_bucket:
            return {"1.00": (BASE, BASE)}
        return dict(COGVIDEOX_FUN["_crop" if self.sizes.random_ratio_crop else ""].shapes)

    @cached_property
    def _sides(self) -> tuple[Side, ...]:
        """All sizes, the largest first."""
        sizes = sorted({*self._stills, *self._videos}, reverse=True)
        num_sizes = Counter(f"{size:.0f}px" for size in sizes)
        names = {size: f"{size:.0f}px" for size in sizes}
        exact_names = {size: f"{size:g}px" for size in sizes}  # sizes differ by 1/30 at least
        return tuple(self._side(exact_names[s] if num_sizes[names[s]] > 1 else names[s], s) for s in sizes)

    def _side(self, name: str, size: float) -> Side:
        shapes = np.array(list(self._ratios.values()), np.float64) / BASE * size
        shapes = (shapes / self.divisor).astype(np.int64) * self.divisor
        if not shapes.all():
            raise UserError(
                f"sizes: at a size of {size:g} some shape is thinner than {self.divisor} pixels; choose larger sizes"
            )
        tokens = shapes.prod(axis=1) // self.divisor**2
        longest = np.full(len(shapes), self._longest(size) if size in self._videos else 1)
        if self.sizes.token_budget is not None:
            bounds = [max((t for t, of_time in self.lengths if of_time * one <= self.sizes.token_budget), default=0)
                      for one in tokens.tolist()]  # fmt: skip
            if not all(bounds):
                raise UserError(
                    f"sizes.token_budget = {self.sizes.token_budget}: a single frame of size {size:g} has "
                    f"{tokens.max()} tokens; raise it, or lower the sizes"
                )
            longest = np.minimum(longest, bounds)
        return Side(name, size, shapes, self._allowed(longest))

    def _longest(self, size: float) -> int:
        most = self.sizes.video_sample_n_frames
        if self.sizes.training_with_video_token_length:
            return min(most, frames_of_tokens(size, self.sizes.token_sample_size, most, self.collate))
        return most

    def _allowed(self, frames: np.ndarray) -> np.ndarray:
        """Return the longest length there is up to so many frames, of which there is at least one."""
        lengths = np.array([frames for frames, _ in self.lengths], np.int64)
        return lengths[np.searchsorted(lengths, np.maximum(frames, 1), side="right") - 1]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All, by size from the largest, then length from the longest, then ratio as in the table."""
        return tuple(
            Bucket(side.name, frames, ratio, (frames, *shape), self.sizes.batch_size * self.tiles((frames, *shape)))
            for side in self._sides
            for frames, _ in reversed(self.lengths)
            for ratio, shape, longest in zip(self._ratios, side.shapes.tolist(), side.longest.tolist(), strict=True)
            if frames <= longest
        )

    def tiles(self, shape: tuple[int, ...]) -> int:
        """How many times the batch size a bucket of a shape has."""
        if not self.sizes.auto_tile_batch_size:
            return 1
        pixels = self.sizes.video_sample_n_frames * self.sizes.token_sample_size**2
        return 4 if np.prod(shape) <= pixels / 16 else 2 if np.prod(shape) <= pixels / 4 else 1

    @cached_property
    def shapes(self) -> np.ndarray:
        """int64 [B, 3]: (T, H, W) of `buckets`."""
        return np.array([bucket.shape for bucket in self.buckets], np.int64).reshape(-1, 3)

    @cached_property
    def entries(self) -> frozenset[tuple[str, int]]:
        """(resolution, frames) of the buckets that clips can take."""
        return frozenset(bucket.entry for bucket in self.buckets)

    @cached_property
    def _places(self) -> np.ndarray:
        """int32 [sizes, ratios, frames + 1]: the bucket there, -1 where there is none."""
        found = np.full((len(self._sides), len(self._ratios), self.lengths[-1][0] + 1), -1, np.int32)
        sides = {side.name: place for place, side in enumerate(self._sides)}
        ratios = {ratio: place for place, ratio in enumerate(self._ratios)}
        for place, bucket in enumerate(self.buckets):
            found[sides[bucket.resolution], ratios[bucket.ratio], bucket.num_frames] = place
        return found

    def assign_chunk(self, columns: Columns, draw: BucketDraw) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket of each clip: all that have a frame are in one."""
        num_frames, height, width, _ = columns
        with np.errstate(invalid="ignore"):
            valid = np.isfinite(num_frames + height + width) & (num_frames >= 1) & (height >= 1) & (width >= 1)
        timing, room = self._room(columns)
        code = np.where(valid, np.where(room < 1, Unused.TOO_SHORT, 0), Unused.INVALID).astype(np.int32)
        for is_still in (True, False):
            rows = np.flatnonzero((code == 0) & ((num_frames == 1) == is_still))
            if len(rows):
                side = self._drawn_side(rows, height[rows], width[rows], is_still, draw)
                ratio = self._ratio(rows, height[rows], width[rows], draw)
                frames = np.ones(len(rows), np.int64) if is_still else self._frames(rows, room[rows], side, ratio, draw)
                code[rows] = self._places[side, ratio, frames]
        return code, timing.interval

    def _drawn_side(
        self, rows: np.ndarray, height: np.ndarray, width: np.ndarray, is_still: bool, draw: BucketDraw
    ) -> np.ndarray:
        """Return the size of each clip, as its place in `_sides`."""
        sizes = self._stills if is_still else self._videos
        places = np.array([next(i for i, side in enumerate(self._sides) if side.size == size) for size in sizes])
        if len(sizes) == 1:
            return np.full(len(rows), places[0])
        u = draw(rows, "image size" if is_still else "video size", 0, False)
        if is_still or not self.sizes.training_with_video_token_length:
            return places[np.searchsorted(np.cumsum(list(sizes.values()))[:-1], u, side="right")]
        # of the frames as the published program decodes them: scaled down to the largest size, never up
        least = np.minimum(height, width)
        scale = np.minimum(1.0, max(self.sizes.image_sample_size, self.sizes.video_sample_size) / least)
        mean = (np.floor(height * scale + 1e-9) + np.floor(width * scale + 1e-9)) / 2
        small_enough = np.searchsorted(np.array(list(sizes)), _ENLARGED * mean, side="left")
        return places[np.floor(u * np.where(small_enough, small_enough, len(sizes))).astype(np.int64)]

    def _ratio(self, rows: np.ndarray, height: np.ndarray, width: np.ndarray, draw: BucketDraw) -> np.ndarray:
        """Return the aspect ratio of each clip, as its place in the table."""
        if not self.sizes.enable_bucket:
            return np.zeros(len(rows), np.int64)
        if self.sizes.random_ratio_crop:
            crop = COGVIDEOX_FUN["_crop"].weights
            assert crop is not None
            weights = np.array(list(crop.values()), np.float64)
            ends = np.cumsum(weights / weights.sum())[:-1]
            return np.searchsorted(ends, draw(rows, "ratio", 0, False), side="right")
        return closest_ratio(height, width, self._ratios, KIND_OF_LAW)

    def _frames(
        self, rows: np.ndarray, room: np.ndarray, side: np.ndarray, ratio: np.ndarray, draw: BucketDraw
    ) -> np.ndarray:
        """Return the length of each video."""
        most, longest = self.sizes.video_sample_n_frames, np.stack([one.longest for one in self._sides])
        frames = np.minimum(room, longest[side, ratio])
        if self.sizes.random_frame_crop and len(options := np.arange(5, most + 4, 4)) > 1:
            u = draw(rows, "frames", 0, False)
            shorter = np.floor(u / (1 - _WHOLE_LENGTH) * (len(options) - 1)).astype(np.int64)
            frames = np.minimum(frames, options[np.minimum(shorter, len(options) - 1)])
        if self.sizes.keep_all_node_same_token_length:
            sizes = np.array(token_sizes(_LEAST_TOKENS, max(_LEAST_TOKENS, self.sizes.token_sample_size)))
            drawn = sizes[np.floor(draw(rows, "tokens", 0, False) * len(sizes)).astype(np.int64)]
            shapes = np.stack([one.shapes for one in self._sides])[side, ratio]
            of_tokens = np.minimum(drawn**2 * most / shapes.prod(axis=1), most)
            frames = np.minimum(frames, (of_tokens - 1) // 4 * 4 + 1)
        return self._allowed(frames)

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        """Return the part of each clip between the drops, at its stride."""
        return self._room(columns)[0]

    def _room(self, columns: Columns) -> tuple[Timing, np.ndarray]:
        """Which frames of clips may be used, and how many of them at the stride."""
        total, fps = np.nan_to_num(columns[0]), np.nan_to_num(columns[3], posinf=0.0)
        begin, end = self.sizes.video_length_drop_start, self.sizes.video_length_drop_end
        interval = np.full(len(total), self.sizes.video_sample_stride, np.int64)
        if self.sizes.video_sample_fps is not None:
            by_rate = np.maximum(1, np.rint(fps / self.sizes.video_sample_fps)).astype(np.int64)
            interval = np.where(fps > 0, by_rate, interval)
        interval = np.where(total == 1, 1, interval)
        stop = np.where(total == 1, 1, np.floor(end * total)).astype(np.int64)
        first = np.where(total == 1, 0, np.floor(begin * stop)).astype(np.int64)
        frames = np.floor(np.where(total == 1, 1.0, total * (end - begin)) / interval)
        room = np.minimum(frames, (stop - first - 1) // interval + 1)
        rate = np.maximum(fps, 0.0) / interval
        return Timing(rate, interval, first, stop), np.minimum(room, self.sizes.video_sample_n_frames).astype(np.int64)

    def content(self) -> dict[str, Any]:
        """What decides which bucket, and which frames, a sample has; batch sizes are left out."""
        data = self.to_json()
        del data["sizes"]["batch_size"], data["sizes"]["auto_tile_batch_size"]
        return data

    def to_json(self) -> dict[str, Any]:
        """Return the law as plain data."""
        lengths = [list(one) for one in self.lengths]
        data = {"sizes": self.sizes.model_dump(mode="json"), "divisor": self.divisor, "lengths": lengths}
        return {KIND: KIND_OF_LAW, **data, "collate": self.collate}


def fun_law(sizes: FunSizes, config: Any) -> FunLaw:
    """Return the law of a run's config; lengths that its autoencoder or model cannot take are left out."""
    if sizes.keep_all_node_same_token_length and hasattr(config, "dataset") and not config.dataset.balance:
        raise UserError(
            "sizes.keep_all_node_same_token_length = True: acts through dataset.balance, which puts slots of equal "
            "tokens side by side, and that is False; write dataset.balance = True"
        )
    found = []
    for num_frames in range(1, sizes.video_sample_n_frames + 1, STEP):
        latents = config.ae.latent(num_frames, 1, 1)[1]
        if config.ae.has_length(num_frames) and not config.model.refuses_length(latents):
            found.append((num_frames, -(-latents // config.model.patch[0])))
    most = sizes.video_sample_n_frames
    if [frames for frames, _ in found[:1]] != [1] or (len(found) == 1 and most > STEP):
        raise UserError(
            f"sizes.video_sample_n_frames = {most}: the lengths that the model and its autoencoder take up to that are "
            f"{', '.join(str(frames) for frames, _ in found) or 'none'}; 1 is needed, and another one for videos"
        )
    return FunLaw(sizes, config.size_divisor, tuple(found), COLLATE in config.quirks)


def read_law(data: Mapping[str, Any]) -> FunLaw:
    """Return the law that `to_json` wrote."""
    lengths = tuple((frames, tokens) for frames, tokens in data["lengths"])
    return FunLaw(FunSizes(**data["sizes"]), data["divisor"], lengths, data["collate"])
