"""A judge of the made-up shapes that only looks at pixels: which colour the clip shows, and where that colour moves.

It knows neither the model nor how the clips were drawn. The ground is grey, so what has a hue is the shape; edges may
be soft. The form of the shape is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from longtake.data.shapes import COLOURS, DIRECTIONS

MIN_TRAVEL = 0.12  # of the frame's width (or height, for up and down) from the first to the last frame
_MIN_CHROMA = 40.0  # of 255: below this nothing in the clip counts as coloured
_BLOB = 0.35  # share of the clip's strongest chroma above which a pixel belongs to a blob


@dataclass(frozen=True)
class Judgement:
    """What a clip shows. Travel is the way of the coloured blob, as shares of the frame's width and height."""

    colour: str | None  # a name of `COLOURS`; None where nothing is coloured
    direction: str | None  # a name of `DIRECTIONS`; None where the blob stands still
    right: float  # negative is to the left
    down: float  # negative is up


@dataclass(frozen=True)
class Accuracy:
    """Shares of right clips in [0, 1]; NaN where there was nothing to judge."""

    colour: float  # of all clips
    direction: float  # of the clips whose prompt names a direction
    both: float  # of all clips: right in everything the prompt names
    count: int  # clips judged


def judge(frames: np.ndarray) -> Judgement:
    """Judges one clip, uint8 [T, H, W, 3] in RGB; a still has T = 1 and no direction."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"the judge takes uint8 [T, H, W, 3], not {frames.dtype} {list(frames.shape)}")
    chroma, nearest = _chroma_and_colour(frames.astype(np.float32))
    strongest = float(np.percentile(chroma, 99.5))
    if strongest < _MIN_CHROMA:
        return Judgement(None, None, 0.0, 0.0)
    strength = np.clip(chroma - _BLOB * strongest, 0.0, None)
    votes = np.bincount(nearest.ravel(), weights=strength.ravel(), minlength=len(COLOURS))
    winner = int(votes.argmax())
    right, down = _travel(np.where(nearest == winner, strength, 0.0))
    return Judgement(list(COLOURS)[winner], _direction(right, down), right, down)


def is_right(prompt: str, judgement: Judgement) -> tuple[bool, bool | None]:
    """Whether the colour and the direction are those a prompt names; None for a direction it does not name."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    colour = next((word for word in words if word in COLOURS), None)
    direction = next((word for word in words if word in DIRECTIONS), None)
    if colour is None:
        raise ValueError(f"the prompt {prompt!r} names no colour of {', '.join(COLOURS)}: nothing can be judged")
    return judgement.colour == colour, None if direction is None else judgement.direction == direction


def score(clips: Iterable[tuple[str, np.ndarray]]) -> Accuracy:
    """Judges (prompt, frames uint8 [T, H, W, 3]) pairs and counts what is right."""
    results = [is_right(prompt, judge(frames)) for prompt, frames in clips]
    directions = [direction for _, direction in results if direction is not None]
    return Accuracy(
        colour=_share([colour for colour, _ in results]),
        direction=_share(directions),
        both=_share([colour and direction is not False for colour, direction in results]),
        count=len(results),
    )


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
    """The way of the centroid of mass [T, H, W], to the right and down, as shares of width and height, by a straight
    line fitted to the frames, each counted by its mass: one in which the blob fades or flickers decides nothing."""
    num_frames, height, width = mass.shape
    weight = mass.sum((1, 2))
    if num_frames < 2 or np.count_nonzero(weight > 0.05 * weight.max()) < 2:
        return 0.0, 0.0
    safe = np.maximum(weight, 1e-6)
    x = (mass.sum(1) @ (np.arange(width) + 0.5)) / safe / width
    y = (mass.sum(2) @ (np.arange(height) + 0.5)) / safe / height
    time = np.arange(num_frames) - np.average(np.arange(num_frames), weights=weight)
    slope = [float((weight * time * values).sum() / (weight * time * time).sum()) for values in (x, y)]
    return slope[0] * (num_frames - 1), slope[1] * (num_frames - 1)


def _direction(right: float, down: float) -> str | None:
    along = {name: right * x + down * y for name, (x, y) in DIRECTIONS.items()}
    best = max(along, key=lambda name: along[name])
    return best if along[best] > MIN_TRAVEL else None


def _share(values: list[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
