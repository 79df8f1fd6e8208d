"""Which frames of a clip a sample takes, and how they reach its bucket's shape: scaled to cover it, then cut."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from longtake.data.rules import named


def window(total: int, num_frames: int, interval: int, u: float | np.floating, law: str = "even") -> np.ndarray:
    """Return the frame numbers of one sample: int64 [num_frames].

    `total`: frames of the clip; `interval`: stride in source frames; `u`: uniform in [0, 1), the place of the window.
    law: one of `WINDOWS`, or a family's (`SampleRules`). Raises `ValueError` where none fits.
    """
    return named(law, WINDOWS)(total, num_frames, interval, float(u))


def even_window(total: int, num_frames: int, interval: int, u: float) -> np.ndarray:
    """Return the stride is exactly `interval` and each of the `total - span + 1` windows that fit is equally likely."""
    span = (num_frames - 1) * interval + 1
    if num_frames < 1 or interval < 1 or span > total:
        raise ValueError(f"{num_frames} frames at a stride of {interval} do not fit into a clip of {total} frames")
    start = int(u * (total - span + 1))
    return start + interval * np.arange(num_frames, dtype=np.int64)


def spread_window(total: int, num_frames: int, interval: int, start: int) -> np.ndarray:
    """Return the frame numbers Open-Sora 2.0 takes from `start` on: int64 [num_frames].

    It spreads them evenly, with fractions cut off, over `num_frames * interval` source frames, so the stride is not
    exactly `interval`; its start never reaches the last window that fits; a clip that is too short is spread over what
    there is.
    """
    stop = min(start + num_frames * interval, total)
    return np.linspace(start, stop - 1, num_frames).astype(np.int64)


def _drawn_spread(total: int, num_frames: int, interval: int, u: float) -> np.ndarray:
    starts = max(0, total - num_frames * interval - 1) + 1
    return spread_window(total, num_frames, interval, int(u * starts))


WINDOWS = MappingProxyType({"even": even_window, "spread": _drawn_spread})


def resize_crop(frames: np.ndarray, size: tuple[int, int], law: str = "bytes", still: bool = False) -> Tensor:
    """`fit_frame` of each frame: uint8 [T, H, W, 3] -> [3, T, height, width], contiguous."""
    fitted = [fit_frame(pixels, size, law, still) for pixels in frames]
    return torch.from_numpy(np.ascontiguousarray(np.stack(fitted, axis=1)))


def fit_frame(pixels: np.ndarray, size: tuple[int, int], law: str = "bytes", still: bool = False) -> np.ndarray:
    """One frame that covers `size` with nothing stretched, the overhang cut evenly.

    `pixels`: uint8 [H, W, 3]; `size`: (height, width) wanted. Returns [3, height, width], maybe a view: uint8, float32
    in [-1, 1] under any law but `bytes` and `whole`. law: one of `PIXELS`, or a family's (`SampleRules`).
    """
    return named(law, PIXELS)(pixels, size, still)


def _bytes(pixels: np.ndarray, size: tuple[int, int], still: bool) -> np.ndarray:
    """Scaling is bicubic with antialiasing, on bytes: cheaper than swscale's bicubic straight from the decoder's YUV
    (benchmarks/fetch.py compares them), and far cheaper than in fp32. Nothing is computed when the size already
    matches."""
    height, width = pixels.shape[:2]
    if (height, width) != size:
        covered = cover_size((height, width), size)
        if covered != (height, width):
            planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)  # a channels-last view
            scaled = F.interpolate(planes[None], size=covered, mode="bicubic", antialias=True)
            pixels = scaled[0].permute(1, 2, 0).numpy()
        top, left = (covered[0] - size[0]) // 2, (covered[1] - size[1]) // 2
        pixels = pixels[top : top + size[0], left : left + size[1]]
    return pixels.transpose(2, 0, 1)


def _whole(pixels: np.ndarray, size: tuple[int, int], still: bool) -> np.ndarray:
    """Bytes scaled to the size, a little out of proportion where its aspect ratio is another; nothing is cut."""
    if pixels.shape[:2] != size:
        planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
        return F.interpolate(planes[None], size=size, mode="bicubic", antialias=True)[0].numpy()
    return pixels.transpose(2, 0, 1)


def cover_size(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest (height, width) with the aspect of `source` that covers `target`: one side equals the
    target's."""
    (height, width), (wanted_height, wanted_width) = source, target
    if wanted_height * width >= wanted_width * height:  # the height decides
        return wanted_height, max(wanted_width, round(width * wanted_height / height))
    return max(wanted_height, round(height * wanted_width / width)), wanted_width


def to_unit(video: Tensor) -> Tensor:
    """Bytes to float32 in [-1, 1]: `x / 127.5 - 1`; a float tensor is returned as it is. Any shape."""
    return video.float().div_(127.5).sub_(1.0) if video.dtype == torch.uint8 else video


def from_unit(video: Tensor) -> Tensor:
    """Floats in [-1, 1] to bytes, rounded to nearest and clamped: the inverse of `to_unit`. Any shape."""
    return video.float().add(1.0).mul_(127.5).round_().clamp_(0, 255).to(torch.uint8)


def _float32(pixels: np.ndarray, size: tuple[int, int], still: bool) -> np.ndarray:
    """As Open-Sora 2.0 made it: videos bilinear in fp32 without antialiasing, stills bicubic on bytes by Pillow, and
    the two cut with differently rounded offsets."""
    covered = _float32_cover(pixels.shape[:2], size)
    whole = round if still else int
    top, left = whole((covered[0] - size[0]) / 2), whole((covered[1] - size[1]) / 2)
    if still:
        # Width first, height then: Pillow up to 12 does so in one call, 13 begins with the cheaper of the two.
        wide = Image.fromarray(pixels).resize((covered[1], pixels.shape[0]), Image.Resampling.BICUBIC)
        pixels = np.array(wide.resize((covered[1], covered[0]), Image.Resampling.BICUBIC))
    planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].contiguous().float() / 255.0
    if not still:
        planes = F.interpolate(planes, size=covered, mode="bilinear", align_corners=False)
    return ((planes[0, :, top : top + size[0], left : left + size[1]] - 0.5) / 0.5).numpy()


def _float32_cover(source: tuple[int, ...], target: tuple[int, int]) -> tuple[int, int]:
    """Return the covering size with that program's comparison of ratios and rounding."""
    (height, width), (wanted_height, wanted_width) = source, target
    scale_height, scale_width = wanted_height / height, wanted_width / width
    if scale_height > scale_width:
        return wanted_height, round(width * scale_height)
    return round(height * scale_width), wanted_width


PIXELS = MappingProxyType({"bytes": _bytes, "whole": _whole, "float32": _float32})
