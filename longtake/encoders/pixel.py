"""A video autoencoder without parameters: space-time patches of pixels are the latents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.config import PixelConfig


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
        if video.shape[2] < pt:
            video = torch.einsum("st,bcthw->bcshw", _slow_motion(video.shape[2], pt, video), video)
        b, c, t, height, width = video.shape
        if self.config.overlap:
            video = _lapped(height, ps, video) @ video @ _lapped(width, ps, video).T
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
            video = _lapped(h * ps, ps, video).T @ video @ _lapped(w * ps, ps, video)
        if num_frames < pt:
            fitted = torch.linalg.pinv(_slow_motion(num_frames, pt, video))
            video = torch.einsum("ts,bcshw->bcthw", fitted, video)
        return video[:, :, :num_frames].clamp(-1, 1)


def _slow_motion(num_frames: int, block: int, like: Tensor) -> Tensor:
    """Linear interpolation in time that keeps the first and the last frame, `[block, num_frames]`; made on the device
    of `like`, which is not waited for."""
    place = torch.linspace(0, num_frames - 1, block, dtype=torch.float64, device=like.device)
    frames = torch.arange(num_frames, device=like.device)
    return (1 - (place[:, None] - frames).abs()).clamp(min=0).to(like.dtype)


def _lapped(length: int, block: int, like: Tensor) -> Tensor:
    """The modulated lapped transform of a line of pixels, orthogonal, `[length, length]`: block by block `block`
    frequencies under a sine window that reaches half a block into both neighbours (Malvar, 1990). It is a rotation of
    the pixels mirrored at each border, then a DCT-IV of each block."""
    pixel = torch.arange(length, device=like.device)
    place = pixel % block
    is_right = place < block / 2  # of its nearest border
    distance = torch.where(is_right, place, block - 1 - place)
    mirrored = torch.where(is_right, pixel - 2 * distance - 1, pixel + 2 * distance + 1)
    angle = math.pi / 4 * (1 - (2 * distance.double() + 1) / block)
    angle = angle.where((mirrored >= 0) & (mirrored < length), 0.0)
    sine = angle.sin() * torch.where(is_right, -1.0, 1.0)
    folded = angle.cos().diag() + torch.where(pixel == mirrored[:, None], sine[:, None], 0.0)
    places = torch.arange(block, dtype=torch.float64, device=like.device) + 0.5
    dct = math.sqrt(2 / block) * torch.cos(math.pi / block * torch.outer(places, places.flip(0)))
    blocks = torch.kron(torch.eye(length // block, dtype=torch.float64, device=like.device), dct)
    return (blocks @ folded).to(like.dtype)
