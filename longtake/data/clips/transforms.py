"""Source frames to the shape of a bucket: scale until it is covered, then cut the centre."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Compat = Literal["opensora_v2"]


def resize_crop(frames: np.ndarray, size: tuple[int, int], compat: Compat | None = None, still: bool = False) -> Tensor:
    """`fit_frame` of each frame: uint8 [T, H, W, 3] -> [3, T, height, width], contiguous."""
    fitted = [fit_frame(pixels, size, compat, still) for pixels in frames]
    return torch.from_numpy(np.ascontiguousarray(np.stack(fitted, axis=1)))


def fit_frame(
    pixels: np.ndarray, size: tuple[int, int], compat: Compat | None = None, still: bool = False
) -> np.ndarray:
    """One frame that covers `size` with nothing stretched, the overhang cut evenly.

    `pixels`: uint8 [H, W, 3]; `size`: (height, width) wanted. Returns uint8 [3, height, width], maybe a view.

    Scaling is bicubic with antialiasing, on bytes: cheaper than swscale's bicubic straight from the decoder's YUV
    (benchmarks/fetch.py compares them), and far cheaper than in fp32. Nothing is computed when the size already
    matches.

    `compat="opensora_v2"` returns float32 in [-1, 1] as that program made it: videos bilinear in fp32 without
    antialiasing, stills (`still=True`) bicubic on bytes by Pillow, and the two cut with differently rounded offsets.
    """
    if compat == "opensora_v2":
        return _opensora_still(pixels, size) if still else _opensora_frame(pixels, size)
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


def cover_size(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The smallest (height, width) with the aspect of `source` that covers `target`: one side equals the target's."""
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


def _opensora_frame(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] of a video -> float32 [3, height, width] in [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].contiguous().float() / 255.0
    covered = _opensora_cover(frame.shape[:2], size)
    pixels = F.interpolate(pixels, size=covered, mode="bilinear", align_corners=False)[0]
    top, left = int((covered[0] - size[0]) / 2), int((covered[1] - size[1]) / 2)
    return ((pixels[:, top : top + size[0], left : left + size[1]] - 0.5) / 0.5).numpy()


def _opensora_still(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] -> float32 [3, height, width] in [-1, 1]."""
    covered = _opensora_cover(pixels.shape[:2], size)
    scaled = np.asarray(Image.fromarray(pixels).resize((covered[1], covered[0]), Image.Resampling.BICUBIC))
    top, left = round((covered[0] - size[0]) / 2), round((covered[1] - size[1]) / 2)
    cut = torch.from_numpy(scaled[top : top + size[0], left : left + size[1]].copy()).permute(2, 0, 1)
    return ((cut.float() / 255.0 - 0.5) / 0.5).numpy()


def _opensora_cover(source: tuple[int, ...], target: tuple[int, int]) -> tuple[int, int]:
    """The covering size with that program's comparison of ratios and rounding."""
    (height, width), (wanted_height, wanted_width) = source, target
    scale_height, scale_width = wanted_height / height, wanted_width / width
    if scale_height > scale_width:
        return wanted_height, round(width * scale_height)
    return round(height * scale_width), wanted_width
