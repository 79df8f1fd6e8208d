"""Masks of pixels as CogVideoX-Fun draws them for training: bool [T, H, W], True where pixels are to be made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from longtake.diffusion.known import PixelShape
from longtake.random import Numbers

_MOST_GIVEN = 4  # frames at an end of a clip


def _span(centre: int, size: int, side: int) -> slice:
    return slice(max(centre - size // 2, 0), min(centre + size // 2, side))


def _in_box(numbers: Numbers, shape: PixelShape) -> tuple[slice, slice]:
    """Rows and columns of a box of a quarter to three quarters of either side, cut off where the picture ends."""
    _, height, width = shape
    x, y = numbers.integer(0, width), numbers.integer(0, height)
    wide, high = (numbers.integer(side // 4, side // 4 * 3) for side in (width, height))
    return _span(y, high, height), _span(x, wide, width)


def box(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Return a box in all frames."""
    mask = np.zeros(shape, bool)
    rows, columns = _in_box(numbers, shape)
    mask[:, rows, columns] = True
    return mask


def everywhere(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    return np.ones(shape, bool)


def after_head(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """All but the first one to four frames."""
    mask = np.zeros(shape, bool)
    mask[numbers.integer(1, _MOST_GIVEN + 1) :] = True
    return mask


def between_ends(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """All but as many frames, one to four, at the head and at the tail."""
    mask, given = np.zeros(shape, bool), numbers.integer(1, _MOST_GIVEN + 1)
    mask[given:-given] = True
    return mask


def box_for_a_while(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Return a box from a frame of the first half to one of the second."""
    mask, half = np.zeros(shape, bool), shape[0] // 2
    rows, columns = _in_box(numbers, shape)
    first, end = numbers.integer(0, half), numbers.integer(half, shape[0])
    mask[first:end, rows, columns] = True
    return mask


def dots(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Every other pixel, by chance."""
    return numbers.bits(shape)


def blocks(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Return a small block in each of up to half of the frames."""
    mask, (frames, height, width) = np.zeros(shape, bool), shape
    for frame in numbers.some(numbers.integer(1, max(frames // 2, 1) + 1), frames):
        high, wide = (numbers.integer(1, side // 4 + 1) for side in (height, width))
        top, left = numbers.integer(0, height - high + 1), numbers.integer(0, width - wide + 1)
        mask[frame, top : top + high, left : left + wide] = True
    return mask


def _in_ellipse(numbers: Numbers, shape: PixelShape, radii: int) -> np.ndarray:
    mask, (_, height, width) = np.zeros(shape, bool), shape
    x, y = numbers.integer(0, width), numbers.integer(0, height)
    short = min(height, width)
    found = [max(numbers.integer(short // 8, short // 4), 1) for _ in range(radii)]
    rows, columns = np.arange(height)[:, None] - y, np.arange(width) - x
    mask[0] = rows**2 / found[-1] ** 2 + columns**2 / found[0] ** 2 < 1
    return mask


def ellipse(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Return an ellipse in the first frame."""
    return _in_ellipse(numbers, shape, 2)


def circle(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Return a circle in the first frame."""
    return _in_ellipse(numbers, shape, 1)


def some_frames(numbers: Numbers, shape: PixelShape) -> np.ndarray:
    """Every other frame, by chance."""
    drawn = np.array([numbers.share() > 0.5 for _ in range(shape[0])])
    return np.broadcast_to(drawn[:, None, None], shape).copy()


# Kind -> what draws it, and its share of clips and of stills; in the order of the published numbers, from 0.
MASKS: dict[str, tuple[Callable[[Numbers, PixelShape], np.ndarray], float, float]] = {
    "inpaint_box": (box, 0.05, 0.20),
    "inpaint_all": (everywhere, 0.20, 0.70),
    "inpaint_head": (after_head, 0.20, 0.0),
    "inpaint_ends": (between_ends, 0.20, 0.0),
    "inpaint_span": (box_for_a_while, 0.05, 0.0),
    "inpaint_dots": (dots, 0.05, 0.0),
    "inpaint_blocks": (blocks, 0.05, 0.0),
    "inpaint_ellipse": (ellipse, 0.10, 0.05),
    "inpaint_circle": (circle, 0.05, 0.05),
    "inpaint_frames": (some_frames, 0.05, 0.0),
}
