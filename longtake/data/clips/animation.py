"""Animated pictures (WebP, AVIF, PNG), which players show as they show a GIF: their frames and times, by Pillow."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import numpy as np
from PIL import Image

from longtake.data.clips.display import coding_of, image_picture
from longtake.data.clips.formats import IMAGE_SUFFIXES, suffix_of

_FORMATS = frozenset({"WEBP", "AVIF", "PNG", "GIF"})  # further pictures of others are pages, or views of a scene
_SHORTEST_MS, _DEFAULT_MS = 10, 100  # browsers show frames of at most the first for the second


def is_still(path: str | os.PathLike[str]) -> bool:
    """Return True for a local file that is a picture of one frame; the name of one that cannot be read decides."""
    if suffix_of(path) not in IMAGE_SUFFIXES:
        return False
    try:
        with Image.open(path) as image:
            return count_frames(image) == 1
    except Exception:  # Pillow lets any kind through; the reader of the picture gives the reason
        return True


def count_frames(image: Image.Image) -> int:
    """Frames that a player shows, 1 of a still. `image`: as `Image.open` gives it."""
    if image.format not in _FORMATS:
        return 1
    return max(1, getattr(image, "n_frames", 1) - _first(image))


def _first(image: Image.Image) -> int:
    """Return the place of the first frame: a PNG may begin with a picture for readers that know no animation."""
    return int(getattr(image, "default_image", False))


def animation_frames(image: Image.Image, wanted: Collection[int] | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """Numbered frames in showing order (None: all), uint8 [H, W, 3] RGB as they are shown (`image_picture`)."""
    coding, first, last = coding_of(image), _first(image), max(wanted, default=0) if wanted is not None else None
    for number in range(count_frames(image)):
        image.seek(first + number)
        image.load()
        if wanted is None or number in wanted:
            yield number, np.array(image_picture(image, coding))
        if number == last:
            return


def frame_seconds(image: Image.Image) -> np.ndarray:
    """How long each frame is shown: float64 [N]. All are decoded."""
    shown, first = [], _first(image)
    for number in range(count_frames(image)):
        image.seek(first + number)
        image.load()
        duration = float(image.info.get("duration") or 0)
        shown.append((duration if duration > _SHORTEST_MS else _DEFAULT_MS) / 1000)
    return np.array(shown)
