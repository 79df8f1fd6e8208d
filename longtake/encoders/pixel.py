"""A video autoencoder without parameters: space-time patches of pixels are the latents."""

from __future__ import annotations

import torch
from torch import Tensor

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.config import PixelConfig


class PixelAutoencoder(Autoencoder):
    """Folds blocks of `temporal` x `spatial` x `spatial` pixels into channels; exact both ways.

    A still is repeated to one block of frames, so it has one latent frame like a clip of `temporal` frames. Small
    models learn fast here: few tokens, each of which sees the motion inside its block.
    """

    is_random = False

    def __init__(self, config: PixelConfig, dtype: torch.dtype = torch.float32) -> None:
        """It computes in whatever dtype it is given."""
        self.config = config

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] -> "mean" `[B, C, F, h, w]` of the same dtype, C in the order
        (c, t, y, x): the latents, which are never drawn."""
        if video.shape[2] == 1:
            video = video.expand(-1, -1, self.config.temporal, -1, -1)
        b, c, t, height, width = video.shape
        pt, ps = self.config.temporal, self.config.spatial
        blocks = video.reshape(b, c, t // pt, pt, height // ps, ps, width // ps, ps)
        latents = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
        return {"mean": latents * self.config.scaling_factor}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents `[B, C, F, h, w]` -> `[B, 3, T, H, W]` in [-1, 1]; a still (`num_frames` 1) averages its repeats."""
        b, _, f, h, w = latents.shape
        pt, ps = self.config.temporal, self.config.spatial
        blocks = (latents / self.config.scaling_factor).reshape(b, 3, pt, ps, ps, f, h, w)
        video = blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, 3, f * pt, h * ps, w * ps)
        video = video.mean(dim=2, keepdim=True) if num_frames == 1 else video[:, :, :num_frames]
        return video.clamp(-1, 1)
