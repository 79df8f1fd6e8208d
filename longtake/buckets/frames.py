"""The frame-rate rule: how many source frames one training frame stands for.

A clip faster than the ceiling `fps_max` is read with a whole-number stride, so that no frame is ever blended.
Bucket assignment, the reader and the caption all take the rule from here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def frame_interval(fps: ArrayLike, fps_max: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Stride and resulting rate of clips under a frame-rate ceiling.

    `fps`: frames per second, any shape; `fps_max`: the ceiling, or None for none. Returns `(new_fps, interval)`,
    float64 and int64 of the shape of `fps`:

    - unknown (NaN, infinite, zero or negative): `(0, 1)`;
    - up to the ceiling: `(fps, 1)`;
    - above: `interval = ceil(fps / fps_max)`, `new_fps = floor(fps / interval)`, e.g. 29.97 under 24 -> `(14, 2)`.
    """
    rate = np.asarray(fps, dtype=np.float64)
    known = np.isfinite(rate) & (rate > 0)
    rate = np.where(known, rate, 0.0)
    if fps_max is None:
        return rate, np.ones(rate.shape, np.int64)
    if not fps_max > 0:
        raise ValueError(f"fps_max = {fps_max}: the frame-rate ceiling must be above 0, or None for no ceiling")
    interval = np.maximum(np.ceil(rate / fps_max), 1.0)
    new_fps = np.where(rate <= fps_max, rate, np.floor(rate / interval))
    return new_fps, interval.astype(np.int64)
