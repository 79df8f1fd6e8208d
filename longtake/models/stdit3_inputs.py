"""Inputs of the blocks of `stdit3`: tokens of latents, times and captions, and the positions of tokens.

Shapes: B batch, C latent channels, F latent frames, h w latent grid, S tokens of a frame, M = F S video tokens, L text
tokens, D width, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models import layers
from longtake.models.stdit3_config import STDiT3Config

TIME_FEATURES = 256
THETA = 10000.0


class PatchEmbedder(nn.Module):
    """Latents [B, C, F, h, w] -> tokens [B, M, D]: a convolution, as its weight is published, made as a product."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.patch = config.patch_size[1]
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, config.patch_size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.proj.weight
        return F.linear(layers.patchify(x.to(weight.dtype), self.patch), weight.flatten(1), self.proj.bias)


class TimeEmbedder(nn.Module):
    """Sinusoids of numbers [B, F], of any unit, then an MLP: [B, F, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        features = layers.timestep_features(numbers.flatten(), TIME_FEATURES, factor=1.0)
        return self.mlp(features.to(self.mlp[0].weight.dtype)).unflatten(0, numbers.shape)


class MLP(nn.Module):
    """Linear, GELU (tanh form), Linear."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Text tokens [B, L, caption_channels] -> [B, L, D]; `y_embedding` stands for no text, and gets no gradient."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.y_embedding = nn.Parameter(torch.empty(config.model_max_length, config.caption_channels))
        self.y_proj = MLP(config.caption_channels, config.hidden_size, config.hidden_size)

    def forward(self, text: Tensor) -> Tensor:
        return self.y_proj(text.to(self.y_proj.fc1.weight.dtype))


class FramePositions(nn.Module):
    """Rotations of frames 0 .. F - 1 over the whole head width: fp32 [2, F, 1, 1, K/2], angles in fp64."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, frames: int, device: torch.device) -> Tensor:
        table = layers.rotary_table(layers.places(frames, device), self.head_dim, THETA)
        return table[:, :, None, None]


def frame_frequencies(head_dim: int) -> Tensor:
    """Return the frequencies of those rotations, which published files hold: fp32 [K/2]."""
    return THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def place_positions(grid: Sequence[int], size: Tensor, config: STDiT3Config) -> Tensor:
    """Sines and cosines of the columns, then the rows, of a frame's tokens: fp32 [S, D].

    grid: rows and columns of tokens. size: height and width in pixels [2]: a row and a column are as long as in a
    square of `input_sq_size` pixels with as many tokens.
    """
    scale = size.float().prod().sqrt() / config.input_sq_size
    return sine_positions(grid, config.hidden_size, round(math.sqrt(math.prod(grid))) / scale)


def sine_positions(grid: Sequence[int], width: int, side: Tensor | float) -> Tensor:
    """Return the same where rows and columns are spread over 0 .. side: fp32 [S, width]. On the device of `side`."""
    side = torch.as_tensor(side, dtype=torch.float32)
    freqs = THETA ** (-torch.arange(0, width // 2, 2, dtype=torch.float32, device=side.device) / (width // 2))
    axes = []
    for count in grid:
        angles = (torch.arange(count, dtype=torch.float32, device=side.device) * (side / count))[:, None] * freqs
        axes.append(torch.cat([angles.sin(), angles.cos()], dim=-1))
    rows, columns = axes
    shape = *grid, width // 2
    return torch.cat([columns.expand(shape), rows[:, None].expand(shape)], dim=-1).flatten(0, 1)
