"""A judge of the made-up shapes that only looks at pixels: colour, shape and direction of the motion.

It knows neither the model nor the sizes, speeds and places that were drawn. The ground is grey, so what has a hue is
the shape; edges may be soft. The shape is the one of three ideal silhouettes, of the blob's area and at its centre,
that the blob is nearest to. A second judge sees whether the shape continues evenly from frame to frame, in place and
size. `tests/demo/test_judge.py` holds how often it is right on real and on decoded clips: change it only with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from longtake.data.shapes import COLOURS, DIRECTIONS, SHAPES, cover
from longtake.data.stories import scenes

MIN_TRAVEL = 0.12  # of the frame's width (or height, for up and down) from the first to the last frame
_MIN_CHROMA = 40.0  # of 255: below this nothing in the clip counts as coloured
_BLOB = 0.35  # share of the clip's strongest chroma above which a pixel belongs to a blob
_PLATEAU = 0.5  # share of a frame's strongest chroma above which pixels are inside the blob, not on its edge
_AREAS = {"circle": math.pi, "square": (2 * 0.88) ** 2, "triangle": 0.75 * math.sqrt(3)}  # in squared radii of `cover`
JUDGED = "colour", "shape", "direction"  # what a prompt names
_SOFTNESS = 3  # degrees of softness that silhouettes are tried at
_CENTROIDS = {"circle": 0.0, "square": 0.0, "triangle": 0.25}  # below the centre of `cover`, in radii
MAX_JUMP = 0.1  # of the frame, from one frame to the next, beyond the clip's usual step
MAX_GROWTH = 1.5  # of the blob's mass from one frame to the next, either way


@dataclass(frozen=True)
class Judgement:
    """What a clip shows. Travel is the way of the coloured blob, as shares of the frame's width and height."""

    colour: str | None  # a name of `COLOURS`; None where nothing is coloured
    shape: str | None  # a name of `SHAPES`; None where nothing is coloured
    direction: str | None  # a name of `DIRECTIONS`; None where the blob stands still
    right: float  # negative is to the left
    down: float  # negative is up


@dataclass(frozen=True)
class Accuracy:
    """Shares of right clips in [0, 1]; NaN where there was nothing to judge."""

    colour: float  # of all clips
    shape: float  # of the clips whose prompt names a shape
    direction: float  # of the clips whose prompt names a direction
    both: float  # of all clips: right colour and, where the prompt names one, direction
    count: int  # clips judged
    continuity: float  # of the clips whose prompt names a direction: one blob that goes on evenly

    @property
    def shares(self) -> dict[str, float]:
        """The columns of a table, by name."""
        return {name: share for name, share in vars(self).items() if name != "count"}


def judge(frames: np.ndarray, made: slice = slice(None)) -> Judgement:
    """Judges one clip, uint8 [T, H, W, 3] in RGB; a still has T = 1 and no direction.

    made: the frames that are looked at, where others were given; of fewer frames less way is wanted, as much a frame.
    """
    blob = _blob(frames[made])
    if blob is None:
        return Judgement(None, None, None, 0.0, 0.0)
    colour, mass = blob
    right, down = _travel(mass)
    least = MIN_TRAVEL * (len(mass) - 1) / max(len(frames) - 1, 1)
    return Judgement(colour, _shape(frames[made], mass), _direction(right, down, least), right, down)


def is_continuous(frames: np.ndarray) -> bool:
    """Whether the coloured blob of a clip, uint8 [T, H, W, 3] in RGB, goes on evenly: from no frame to the next does it
    leave its usual step by more than `MAX_JUMP` of the frame, or grow or shrink by more than `MAX_GROWTH` times."""
    blob = _blob(frames)
    if blob is None:
        return False
    weight, x, y = _centroids(blob[1])
    if not weight.all():
        return False
    steps = np.stack([np.diff(x), np.diff(y)])
    jumps = np.linalg.norm(steps - np.median(steps, axis=1, keepdims=True), axis=0)
    return bool((jumps <= MAX_JUMP).all() and (np.abs(np.diff(np.log(weight))) <= math.log(MAX_GROWTH)).all())


@dataclass(frozen=True)
class Verdict:
    """A clip against its prompt: True for what is right, None for what the prompt does not name."""

    colour: bool
    shape: bool | None
    direction: bool | None


def is_right(prompt: str, judgement: Judgement) -> Verdict:
    """Compare a clip with its prompt. A shape that is gone is right where nothing is coloured."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    if "gone" in words:
        return Verdict(judgement.colour is None, None, None)
    colour = next((word for word in words if word in COLOURS), None)
    shape = next((word for word in words if word in SHAPES), None)
    direction = next((word for word in words if word in DIRECTIONS), None)
    if colour is None:
        raise ValueError(f"the prompt {prompt!r} names no colour of {', '.join(COLOURS)}: nothing can be judged")
    return Verdict(
        judgement.colour == colour,
        None if shape is None else judgement.shape == shape,
        None if direction is None else judgement.direction == direction,
    )


def scenes_of(prompt: str, frames: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Each scene of a story, whose prompt is a JSON array, by itself; of another prompt the whole clip."""
    return scenes(json.loads(prompt), frames) if prompt.startswith("[") else [(prompt, frames)]


def score(clips: Iterable[tuple[str, np.ndarray]], made: slice = slice(None)) -> Accuracy:
    """Judges (prompt, frames uint8 [T, H, W, 3]) pairs, stories scene by scene, and counts what is right. made: as for
    `judge`; whether a blob goes on evenly is seen in all frames."""
    verdicts, even = [], []
    for prompt, frames in (scene for clip in clips for scene in scenes_of(*clip)):
        verdicts.append(is_right(prompt, judge(frames, made)))
        if verdicts[-1].direction is not None:
            even.append(is_continuous(frames))
    return Accuracy(
        colour=_share([verdict.colour for verdict in verdicts]),
        shape=_share([verdict.shape for verdict in verdicts if verdict.shape is not None]),
        direction=_share([verdict.direction for verdict in verdicts if verdict.direction is not None]),
        both=_share([verdict.colour and verdict.direction is not False for verdict in verdicts]),
        count=len(verdicts),
        continuity=_share(even),
    )


def _blob(frames: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Return the clip's colour, and how much of it each pixel has, [T, H, W]; None where nothing is coloured."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"the judge takes uint8 [T, H, W, 3], not {frames.dtype} {list(frames.shape)}")
    chroma, nearest = _chroma_and_colour(frames.astype(np.float32))
    strongest = float(np.percentile(chroma, 99.5))
    if strongest < _MIN_CHROMA:
        return None
    strength = np.clip(chroma - _BLOB * strongest, 0.0, None)
    votes = np.bincount(nearest.ravel(), weights=strength.ravel(), minlength=len(COLOURS))
    winner = int(votes.argmax())
    return list(COLOURS)[winner], np.where(nearest == winner, strength, 0.0)


def _chroma_and_colour(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel of float32 [T, H, W, 3]: its distance from grey, and the index of the colour of nearest hue."""
    hues = np.array([_hue_plane(np.array(colour, np.float32)) for colour in COLOURS.values()])
    hues /= np.linalg.norm(hues, axis=1, keepdims=True)
    plane = _hue_plane(pixels)
    return np.linalg.norm(plane, axis=-1), (plane @ hues.T).argmax(-1)


def _hue_plane(rgb: np.ndarray) -> np.ndarray:
    """Projects [..., 3] along the grey axis to [..., 2]: the angle is the hue, the length up to 255 the chroma."""
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    return np.stack([red - 0.5 * (green + blue), math.sqrt(0.75) * (green - blue)], -1)


def _travel(mass: np.ndarray) -> tuple[float, float]:
    """Return the way of the centroid of mass [T, H, W], to the right and down, as shares of width and height, by a
    straight line fitted to the frames, each counted by its mass: one in which the blob fades or flickers decides
    nothing."""
    num_frames = len(mass)
    weight, x, y = _centroids(mass)
    if num_frames < 2 or np.count_nonzero(weight > 0.05 * weight.max()) < 2:
        return 0.0, 0.0
    time = np.arange(num_frames) - np.average(np.arange(num_frames), weights=weight)
    slope = [float((weight * time * values).sum() / (weight * time * time).sum()) for values in (x, y)]
    return slope[0] * (num_frames - 1), slope[1] * (num_frames - 1)


def _centroids(mass: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each frame of mass [T, H, W]: its sum, and its centroid as shares of width and height."""
    _, height, width = mass.shape
    weight = mass.sum((1, 2))
    safe = np.maximum(weight, 1e-6)
    x = (mass.sum(1) @ (np.arange(width) + 0.5)) / safe / width
    y = (mass.sum(2) @ (np.arange(height) + 0.5)) / safe / height
    return weight, x, y


def _shape(frames: np.ndarray, mass: np.ndarray) -> str:
    """Return the silhouette that the blob of mass [T, H, W] is nearest to, over all frames in which it can be seen."""
    weight = mass.sum((1, 2))
    seen = weight > 0.05 * weight.max()
    coverage = _coverage(frames[seen].astype(np.float32), mass[seen])
    _, height, width = coverage.shape
    areas, x, y = _centroids(coverage)
    centres = np.stack([x * width, y * height], axis=1)
    errors = {}
    for name in SHAPES:
        radius = math.sqrt(np.median(areas) / _AREAS[name])
        ideal = cover(name, centres - [0.0, _CENTROIDS[name] * radius], radius, height, width)
        found = []
        for _ in range(_SOFTNESS):  # a video's colours have half its pixels, so that edges may be soft
            found.append(float(np.square(coverage - ideal).sum()))
            ideal = _softened(ideal)
        errors[name] = min(found)
    return min(errors, key=lambda name: errors[name])


def _softened(coverage: np.ndarray) -> np.ndarray:
    """Each pixel of [T, H, W] blended with its neighbours by 1, 2, 1 in rows and columns."""
    for axis in (1, 2):
        pad = [(1, 1) if at == axis else (0, 0) for at in range(3)]
        wide = np.pad(coverage, pad, mode="edge")
        before, after = np.delete(wide, (-1, -2), axis), np.delete(wide, (0, 1), axis)
        coverage = (before + 2 * coverage + after) / 4
    return coverage


def _coverage(frames: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """How much of each pixel of float32 [T, H, W, 3] the blob of mass [T, H, W] covers, in [0, 1]: where it is on the
    way from the colour of the ground to that inside the blob. Brightness counts too, since videos keep it sharper."""
    chroma, _ = _chroma_and_colour(frames)
    inside = (mass > 0) & (chroma > _PLATEAU * chroma.max((1, 2), keepdims=True))
    near = np.pad(mass > 0, ((0, 0), (1, 1), (1, 1)))
    rows = near[:, :-2] | near[:, 1:-1] | near[:, 2:]
    near = rows[:, :, :-2] | rows[:, :, 1:-1] | rows[:, :, 2:]
    coverage = np.zeros(mass.shape)
    for frame, pixels in enumerate(frames):
        outside = pixels[~near[frame]] if not near[frame].all() else pixels.reshape(-1, 3)
        ground = np.median(outside, axis=0)
        way = np.median(pixels[inside[frame]], axis=0) - ground
        coverage[frame] = (pixels - ground) @ way / max(float(way @ way), 1.0)
    return np.clip(coverage, 0.0, 1.0) * near


def _direction(right: float, down: float, least: float) -> str | None:
    along = {name: right * x + down * y for name, (x, y) in DIRECTIONS.items()}
    best = max(along, key=lambda name: along[name])
    return best if along[best] > least else None


def _share(values: list[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
