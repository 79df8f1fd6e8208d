"""How CogVideoX-Fun's loader brings a frame to its bucket's size."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F


def collated(pixels: np.ndarray, size: tuple[int, int], still: bool) -> np.ndarray:
    """Scaled in fp32, bilinear with antialiasing, to cover the size, fractions of pixels cut off; then its middle.

    Called as `data.clips.transforms.fit_frame` calls its laws: uint8 [H, W, 3] -> float32 [3, height, width], -1 to 1.
    """
    covered = covering(pixels.shape[:2], size)
    planes = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].contiguous().float() / 255.0
    planes = F.interpolate(planes, size=covered, mode="bilinear", antialias=True, align_corners=False)
    top, left = (round((own - wanted) / 2) for own, wanted in zip(covered, size, strict=True))
    return ((planes[0, :, top : top + size[0], left : left + size[1]] - 0.5) / 0.5).numpy()


def covering(source: tuple[int, ...], target: tuple[int, int]) -> tuple[int, int]:
    """(height, width) that covers `target`, in the aspect ratio of `source`."""
    (height, width), (wanted_height, wanted_width) = source, target
    if wanted_height / height > wanted_width / width:
        return wanted_height, int(width * wanted_height / height)
    return int(height * wanted_width / width), wanted_width
