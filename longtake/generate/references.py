"""The reference files of a video: which of their frames are known of it, and whether they can be read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from longtake.contracts import UserError
from longtake.data.clips.animation import is_still
from longtake.data.clips.locations import is_url
from longtake.data.clips.transforms import cover_size, resize_crop
from longtake.data.clips.video import ClipError, read_frames, read_image
from longtake.data.probing.one_file import frames_at, probe_file
from longtake.diffusion.known import Window
from longtake.generate.config import GenerateConfig
from longtake.generate.sample import shape_asked

_SAME_RATE = 0.01  # 23.976 frames a second count as 24


def reference_faults(
    paths: Sequence[str], windows: Sequence[Window], config: GenerateConfig, key: str = "ref"
) -> list[str]:
    """Return the errors in the reference files of one prompt, one clause each. Images are decoded to detect them."""
    if windows and not paths:
        return [f"{key}: known frames are asked for, and there is no file that they are taken from"]
    faults = []
    for _, window, files in (piece for one in windows for piece in pieces_of(one, paths)):
        path = files[-1]
        try:
            path = file_of(window, files)
            if is_url(path):
                raise ClipError("is an address, and references are files; fetch it")
            size = read_image(path).shape[1:3] if is_still(path) else None
            frame_numbers(path, window, config)
            check_crop(size or _video_size(path), config)
        except ClipError as error:
            faults.append(f"{key} {path!r}: {error}")
    return list(dict.fromkeys(faults))


def check_crop(size: tuple[int, int], config: GenerateConfig) -> None:
    """Raise `ClipError` for a reference of (height, width) of which more would be cropped than its family allows."""
    limit = config.family.reference_crop
    if limit is None:
        return
    wanted = shape_asked(config, config.sampling_option)[1:]
    covered = cover_size(size, wanted)
    cropped = 1 - math.prod(wanted) / math.prod(covered)
    overhang = max(side - target for side, target in zip(covered, wanted, strict=True))
    if cropped > limit and overhang > config.size_divisor:  # sides are rounded to whole tokens
        raise ClipError(
            f"is {size[0]} x {size[1]} (height x width), expected the aspect ratio of the video, {wanted[0]} x "
            f"{wanted[1]}: {cropped:.0%} of it would be cropped, and {limit:.0%} may be; crop it, or choose "
            f'sampling_option.aspect_ratio = "{size[1]}:{size[0]}"'
        )


def _video_size(path: str) -> tuple[int, int]:
    """Return height and width of a video."""
    info = probe_file(path)
    return info.height, info.width


def known_pixels(
    paths: Sequence[str], windows: Sequence[Window], size: tuple[int, int], config: GenerateConfig
) -> tuple[Tensor, ...]:
    """Return the frames of each window: uint8 or float32 `[3, T, H, W]`, resized to cover `size` and centre-cropped,
    as in training; of a masked one the last of several files gives the last frame. What references do not give is 0.
    Raises `UserError` for a file that cannot be read."""
    found = []
    for window in windows:
        parts = [(span, _pixels_of(files, one, size, config)) for span, one, files in pieces_of(window, paths)]
        whole = parts[0][1]
        if window.shown is not None:
            whole = whole.new_zeros(3, len(window.pixels), *size)
            for span, part in parts:
                whole[:, span] = part
        found.append(whole)
    return tuple(found)


def _pixels_of(paths: Sequence[str], window: Window, size: tuple[int, int], config: GenerateConfig) -> Tensor:
    path = paths[-1]
    try:
        path = file_of(window, paths)
        still, numbers = is_still(path), frame_numbers(path, window, config)
        frames = read_image(path)[numbers] if still else read_frames(path, numbers)
        found = resize_crop(frames, size, config.sample_rules.pixels, still)
        if window.masked and len(paths) > 1:
            found[:, -1:] = _pixels_of(paths[-1:], Window(range(1, 2), range(1)), size, config)
        return found
    except ClipError as error:
        raise UserError(f"ref {path!r}: {error}; give another file") from error


def pieces_of(window: Window, paths: Sequence[str]) -> list[tuple[slice, Window, Sequence[str]]]:
    """Split a window by the references that fill it: (frames of the window, these as a separate window, the files that
    they are taken from). Where there are as many files as frames, each file provides one frame, in their order."""
    if window.shown is None:
        return [(slice(None), window, paths)]
    spans, files = window.shown, [paths] * len(window.shown)
    if 1 < len(paths) == sum(map(len, spans)):
        spans = tuple(range(frame, frame + 1) for frames in spans for frame in frames)
        files = [(path,) for path in paths]
    heads = {frame for frames in window.shown if frames.start == 0 for frame in frames}
    return [
        (slice(span.start, span.stop), Window(range(1) if span.start in heads else range(1, 2), span), of_span)
        for span, of_span in zip(spans, files, strict=True)
    ]


def frame_numbers(path: str, window: Window, config: GenerateConfig, taker: str = "") -> np.ndarray:
    """Return the frames of a file that a window takes, int64 [T]: the first ones, or the last.

    Several frames are sampled at the model's rate, `fps_save`, nearest in time, so that motion keeps its speed; under
    the quirk `reference_rate` they are consecutive frames of the file. A still stands in every frame of a window that
    is masked. Raises `ClipError` for too short a file.
    """
    count, taker = len(window.pixels), taker or f'cond_type = "{config.kind}"'
    if is_still(path):
        if count > 1 and not window.masked:
            raise ClipError(f"is a still image, and {taker} takes {count} frames of a video")
        return np.zeros(count, np.int64)
    info = probe_file(path)
    step = _step(info.fps, config)
    offsets = np.floor(np.arange(count) * step + 0.5).astype(np.int64)
    needed = int(offsets[-1]) + 1
    if needed > info.num_frames:
        raise ClipError(
            f"has {info.num_frames} frames at {info.fps:g} FPS, and {taker} takes {count} at "
            f"{config.fps_save:g} FPS, which are {needed} of them"
        )
    numbers = info.num_frames - 1 - offsets[::-1] if window.takes_end else offsets
    by_time = info.uneven_times and "reference_rate" not in config.quirks
    return frames_at(path, numbers / info.fps) if by_time else numbers


def frames_of(path: str, config: GenerateConfig) -> float:
    """Return the number of frames of a reference at the model's rate, of which `frame_numbers` takes the first or the
    last; infinity where it cannot be read."""
    if is_still(path):
        return 1
    try:
        info = probe_file(path)
    except ClipError:
        return math.inf
    return math.ceil((info.num_frames - 0.5) / _step(info.fps, config))


def _step(fps: float, config: GenerateConfig) -> float:
    """Return the number of frames of a video at this rate per frame at the model's."""
    if "reference_rate" in config.quirks or not math.isfinite(fps) or fps <= 0:
        return 1.0
    ratio = fps / config.fps_save
    return 1.0 if abs(ratio - 1) < _SAME_RATE else ratio


def file_of(window: Window, paths: Sequence[str]) -> str:
    """Return the file of a prompt that a window is taken from. Raises `ClipError` where there are too few."""
    if window.reference is not None:
        if window.reference >= len(paths):
            raise ClipError(f"is 1 of {len(paths)} references, and number {window.reference + 1} is needed")
        return paths[window.reference]
    return paths[-1] if len(window.pixels) == 1 and not window.is_head else paths[0]
