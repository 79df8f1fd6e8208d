"""Reference files: the images and videos whose frames a generation is given, and the frames it takes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from longtake.contracts import UserError
from longtake.data import ClipError, probe_file, read_frames, read_image, resize_crop
from longtake.data.clips.video import is_image
from longtake.diffusion import Kind, Window
from longtake.generate.config import GenerateConfig

_SAME_RATE = 0.01  # 23.976 frames a second are taken for 24


def reference_faults(paths: Sequence[str], windows: Sequence[Window], config: GenerateConfig) -> list[str]:
    """What is wrong with the files of one prompt, each as a clause that names the file. Pictures are read whole."""
    faults = []
    for window in windows:
        path = file_of(window, paths, config.kind)
        try:
            if is_image(path):
                read_image(path)
            frame_numbers(path, window, config)
        except ClipError as error:
            faults.append(f"ref {path!r}: {error}")
    return list(dict.fromkeys(faults))


def known_pixels(
    paths: Sequence[str], windows: Sequence[Window], size: tuple[int, int], config: GenerateConfig
) -> tuple[Tensor, ...]:
    """The frames of each window: uint8 `[3, T, H, W]` (float32 under compat), covering `size` and cut at its centre,
    as in training.

    Raises `UserError` for a file that cannot be read.
    """
    found = []
    for window in windows:
        path = file_of(window, paths, config.kind)
        try:
            still = is_image(path)
            frames = read_image(path) if still else read_frames(path, frame_numbers(path, window, config))
            found.append(resize_crop(frames, size, config.compat, still))
        except ClipError as error:
            raise UserError(f"ref {path!r}: {error}; give another file") from error
    return tuple(found)


def frame_numbers(path: str, window: Window, config: GenerateConfig) -> np.ndarray:
    """Which frames of a file a window takes, int64 [T]: the first of it, or the last.

    Several frames are taken at the model's rate, `fps_save`: each the nearest in time, so that motion keeps its speed.
    Under compat they are the file's own frames, one after the other. Raises `ClipError` for too short a file.
    """
    count = window.num_pixel_frames(config.ae.latent)
    if is_image(path):
        if count > 1:
            raise ClipError(f'is a still, and cond_type = "{config.kind}" takes {count} frames of a video')
        return np.zeros(1, np.int64)
    info = probe_file(path)
    step = 1.0
    if config.compat is None and math.isfinite(info.fps) and info.fps > 0:
        ratio = info.fps / config.fps_save
        step = 1.0 if abs(ratio - 1) < _SAME_RATE else ratio
    offsets = np.floor(np.arange(count) * step + 0.5).astype(np.int64)
    needed = int(offsets[-1]) + 1
    if needed > info.num_frames:
        raise ClipError(
            f'has {info.num_frames} frames at {info.fps:g} FPS, and cond_type = "{config.kind}" takes {count} at '
            f"{config.fps_save:g} FPS, which are {needed} of them"
        )
    return offsets if window.is_head else info.num_frames - 1 - offsets[::-1]


def file_of(window: Window, paths: Sequence[str], kind: Kind) -> str:
    """Which of a prompt's files a window is taken from: i2v takes a tail from the last, all else is from the first."""
    return paths[-1] if kind.startswith("i2v") and not window.is_head else paths[0]
