"""What videos look like, in numbers that need no model: flicker, motion, sharpness, drift of colour, diversity.

Brightness and colours count from 0 to 1. All figures of a video are those of its frames uint8 [T, H, W, 3].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from PIL import Image

_CELLS = 16  # on a side of the pictures that diversity compares
_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)  # of brightness, ITU-R BT.601


@dataclass(frozen=True)
class SeenVideo:
    """A video and what it was made from."""

    prompt: str
    frames: np.ndarray  # uint8 [T, H, W, 3]
    first: np.ndarray | None = None  # uint8 [H, W, 3]: the frame that it was to begin with


def video_figures(frames: np.ndarray) -> dict[str, float]:
    """Return the figures of one video.

    `motion`: mean change of brightness from frame to frame. `flicker`: mean of what a frame's brightness differs from
    the mean of its neighbours, so even motion counts little. `sharpness`: mean difference of neighbouring pixels.
    `drift`: how far the mean colour of the last quarter lies from that of the first.
    """
    light = frames.astype(np.float32) @ (_WEIGHTS / 255)
    found = {"sharpness": float((np.abs(np.diff(light, axis=1)).mean() + np.abs(np.diff(light, axis=2)).mean()) / 2)}
    if len(frames) > 1:
        found["motion"] = float(np.abs(np.diff(light, axis=0)).mean())
        quarter = max(1, len(frames) // 4)
        colours = frames.mean(axis=(1, 2)) / 255
        found["drift"] = float(np.linalg.norm(colours[-quarter:].mean(0) - colours[:quarter].mean(0)))
    if len(frames) > 2:
        found["flicker"] = float(np.abs(light[1:-1] - (light[2:] + light[:-2]) / 2).mean())
    return found


def figures(videos: Sequence[SeenVideo], data: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the mean figures of videos; and `diversity`, how far those of one prompt at several seeds lie apart,
    `variety`, the same of different prompts, `first_frame`, the PSNR in dB of first frames that were given, and with
    those of the `data`, `motion_of_data`: the motion as a multiple of the data's own."""
    found = means(video_figures(video.frames) for video in videos)
    groups = defaultdict[str, list[SeenVideo]](list)
    for video in videos:
        groups[video.prompt].append(video)
    apart = {
        "diversity": [pair for group in groups.values() for pair in combinations(group, 2)],
        "variety": list(combinations([group[0] for group in groups.values()], 2)),
    }
    for name, pairs in apart.items():
        if distances := [_distance(a, b) for a, b in pairs if len(a.frames) == len(b.frames)]:
            found[name] = float(np.mean(distances))
    if given := [_psnr(video.frames[0], video.first) for video in videos if video.first is not None]:
        found["first_frame"] = float(np.mean(given))
    if data and data.get("motion") and "motion" in found:
        found["motion_of_data"] = found["motion"] / data["motion"]
    return found


def means(of_videos: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the videos that have it."""
    values = defaultdict[str, list[float]](list)
    for found in of_videos:
        for name, value in found.items():
            values[name].append(value)
    return {name: float(np.mean(own)) for name, own in sorted(values.items())}


def _distance(a: SeenVideo, b: SeenVideo) -> float:
    """Return the mean difference of two videos as small pictures, in which noise is averaged out."""
    return float(np.abs(_small(a.frames) - _small(b.frames)).mean())


def _small(frames: np.ndarray) -> np.ndarray:
    pictures = (Image.fromarray(frame).resize((_CELLS, _CELLS), Image.Resampling.BOX) for frame in frames)
    return np.stack([np.asarray(picture, np.float32) / 255 for picture in pictures])


def _psnr(frame: np.ndarray, wanted: np.ndarray) -> float:
    error = float(np.square(frame.astype(np.float64) - wanted).mean())
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))
