"""Which frames of a clip a sample takes: the frame-rate rule for one clip, and the window in time."""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtake.buckets.frames import frame_interval

Compat = Literal["opensora_v2"]


def target_fps(fps: float | None, fps_max: float | None) -> tuple[float, int]:
    """`(rate, interval)` of one clip under the ceiling; the rule is `buckets.frame_interval`'s.

    The rate is 0 where unknown (None, NaN), an int where frames are skipped, and `fps` itself otherwise.
    """
    rate, interval = frame_interval(np.nan if fps is None else fps, fps_max)
    below = fps_max is None or not rate or float(fps) < fps_max  # type: ignore[arg-type]
    return (float(rate) if below and rate else int(rate)), int(interval)


def window(
    total: int, num_frames: int, interval: int, u: float | np.floating, compat: Compat | None = None
) -> np.ndarray:
    """The frame numbers of one sample: int64 [num_frames].

    `total`: frames of the clip; `interval`: stride in source frames; `u`: uniform in [0, 1), the place of the window.
    The stride is exactly `interval` and each of the `total - span + 1` windows that fit is equally likely. Raises
    `ValueError` where none fits. `compat="opensora_v2"`: see `window_opensora`.
    """
    if compat == "opensora_v2":
        starts = max(0, total - num_frames * interval - 1) + 1
        return window_opensora(total, num_frames, interval, int(float(u) * starts))
    span = (num_frames - 1) * interval + 1
    if num_frames < 1 or interval < 1 or span > total:
        raise ValueError(f"{num_frames} frames at a stride of {interval} do not fit into a clip of {total} frames")
    start = int(float(u) * (total - span + 1))
    return start + interval * np.arange(num_frames, dtype=np.int64)


def window_opensora(total: int, num_frames: int, interval: int, start: int) -> np.ndarray:
    """The frame numbers Open-Sora 2.0 takes from `start` on: int64 [num_frames].

    It spreads them evenly, with fractions cut off, over `num_frames * interval` source frames, so the stride is not
    exactly `interval`; its start never reaches the last window that fits; a clip that is too short is spread over what
    there is.
    """
    stop = min(start + num_frames * interval, total)
    return np.linspace(start, stop - 1, num_frames).astype(np.int64)
