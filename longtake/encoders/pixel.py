"""A video autoencoder without parameters: space-time patches of pixels are the latents."""

from __future__ import annotations

import torch
from torch import Tensor

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.autoencoder_config import PixelConfig
from longtake.encoders.blocks import cut_frames, fill_block, lapped


class PixelAutoencoder(Autoencoder):
    """Folds blocks of `temporal` x `spatial` x `spatial` pixels into channels; nothing is lost either way.

    A clip shorter than a block is slowed down to fill it: frames between its own are blends of their neighbours, and a
    still is repeated. Small models learn fast here: few tokens, each of which sees the motion inside its block. With
    `overlap` the blocks of a frame are those of a lapped transform, so what a model gets wrong shows no block edges.
    """

    is_random = False

    def __init__(self, config: PixelConfig, dtype: torch.dtype = torch.float32) -> None:
        """It computes in whatever dtype it is given."""
        self.config = config

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] -> "mean" `[B, C, F, h, w]` of the same dtype, C in the order
        (c, t, y, x), with `overlap` (c, t, vertical frequency, horizontal frequency): the latents, never drawn."""
        pt, ps = self.config.temporal, self.config.spatial
        video = fill_block(video, pt)
        b, c, t, height, width = video.shape
        if self.config.overlap:
            video = lapped(height, ps, video) @ video @ lapped(width, ps, video).T
        blocks = video.reshape(b, c, t // pt, pt, height // ps, ps, width // ps, ps)
        latents = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
        return {"mean": latents * self.config.scaling_factor}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents `[B, C, F, h, w]` -> `[B, 3, T, H, W]` in [-1, 1]; of a clip shorter than a block the frames that fit
        the block best, of a still the mean."""
        b, _, f, h, w = latents.shape
        pt, ps = self.config.temporal, self.config.spatial
        blocks = (latents / self.config.scaling_factor).reshape(b, 3, pt, ps, ps, f, h, w)
        video = blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, 3, f * pt, h * ps, w * ps)
        if self.config.overlap:
            video = lapped(h * ps, ps, video).T @ video @ lapped(w * ps, ps, video)
        return cut_frames(video, num_frames, pt).clamp(-1, 1)
