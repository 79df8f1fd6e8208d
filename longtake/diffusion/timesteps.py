"""Laws of time: where training times fall, and the grid a solver walks. Time 0 is clean, 1 is noise, always float32.

Formulas: Esser et al., "Scaling Rectified Flow Transformers", 2024 (sigmoid-normal law, shift by resolution); the
line of the shift and its growth with the number of frames are those of Open-Sora 2.0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The line of the shift goes through (tokens in a frame, alpha) = (256, 1) and (4096, 3).
_FEW_TOKENS, _FEW_ALPHA = 256, 1.0
_MANY_TOKENS, _MANY_ALPHA = 4096, 3.0


def resolution_shift(tokens_per_frame: int, num_frames: int) -> float:
    """Return the shift alpha of a latent video: a line in the tokens of one frame, times the root of the
    latent frames."""
    slope = (_MANY_ALPHA - _FEW_ALPHA) / (_MANY_TOKENS - _FEW_TOKENS)
    return (_FEW_ALPHA + slope * (tokens_per_frame - _FEW_TOKENS)) * math.sqrt(num_frames)


def shift_time(t: Tensor, alpha: float) -> Tensor:
    """Move times towards noise for alpha > 1, keep 0 and 1: alpha t / (1 + (alpha - 1) t); any shape and dtype."""
    return alpha * t / (1 + (alpha - 1) * t)


def sigmoid_normal(z: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return times in (0, 1) from standard normal numbers `z`: sigmoid(mean + std z), float32, of the same shape."""
    return torch.sigmoid(mean + std * z.float())


def make_grid(num_steps: int, alpha: float = 1.0) -> Tensor:
    """Return the times of a solver: float32 [num_steps + 1] on the CPU, falling from exactly 1 to exactly 0.

    Formed in float64, so that the ends are exact; equal steps before the shift.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps = {num_steps}: a solver needs at least 1 step")
    return shift_time(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), alpha).float()
