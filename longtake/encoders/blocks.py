"""Blocks of pixels that overlap: the lapped transform of a line, and short clips slowed down to fill a block."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _slow_motion(num_frames: int, block: int, like: Tensor) -> Tensor:
    """Linear interpolation in time that keeps the first and the last frame, `[block, num_frames]`, on the device of
    `like`."""
    place = torch.linspace(0, num_frames - 1, block, dtype=torch.float64, device=like.device)
    frames = torch.arange(num_frames, device=like.device)
    return (1 - (place[:, None] - frames).abs()).clamp(min=0).to(like.dtype)


def fill_block(video: Tensor, block: int) -> Tensor:
    """Pixels `[B, C, T, H, W]`, slowed down to `block` frames where they have fewer."""
    if video.shape[2] >= block:
        return video
    return torch.einsum("st,bcthw->bcshw", _slow_motion(video.shape[2], block, video), video)


def cut_frames(video: Tensor, num_frames: int, block: int) -> Tensor:
    """Return the first `num_frames` frames of pixels `[B, C, T, H, W]`; the inverse of `fill_block` of fewer than
    `block`: those that fit the block best, by least squares."""
    if num_frames < block:
        fitted = torch.linalg.pinv(_slow_motion(num_frames, block, video))
        video = torch.einsum("ts,bcshw->bcthw", fitted, video)
    return video[:, :, :num_frames]


def folded(video: Tensor, dim: int, block: int, inverse: bool = False) -> Tensor:
    """Rotate the pixels around each border between two blocks against their mirror images, along one dimension.

    The first half of a modulated lapped transform (Malvar, 1990), orthogonal: any orthogonal transform of the blocks
    then has basis functions under a sine window that reach half a block into both neighbours.
    """
    mirrored, cosine, sine = _rotation(video.shape[dim], block, video.device)
    if inverse:  # the transpose
        sine = sine[mirrored]
    shape = [-1 if at == dim % video.ndim else 1 for at in range(video.ndim)]
    cosine, sine = (factor.to(video.dtype).reshape(shape) for factor in (cosine, sine))
    return cosine * video + sine * video.index_select(dim, mirrored)


def lapped(length: int, block: int, like: Tensor) -> Tensor:
    """Return the modulated lapped transform of a line of pixels, orthogonal, `[length, length]`: block by block `block`
    frequencies, by a DCT-IV of the folded pixels."""
    folding = folded(torch.eye(length, dtype=torch.float64, device=like.device), 0, block)
    places = torch.arange(block, dtype=torch.float64, device=like.device) + 0.5
    dct = math.sqrt(2 / block) * torch.cos(math.pi / block * torch.outer(places, places.flip(0)))
    blocks = torch.kron(torch.eye(length // block, dtype=torch.float64, device=like.device), dct)
    return (blocks @ folding).to(like.dtype)


def _rotation(length: int, block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each pixel of a line: the place of its mirror image at the nearest border, and the factors of both, float64;
    the ends of the line have no border."""
    pixel = torch.arange(length, device=device)
    place = pixel % block
    is_right = place < block / 2  # of its nearest border
    distance = torch.where(is_right, place, block - 1 - place)
    mirrored = torch.where(is_right, pixel - 2 * distance - 1, pixel + 2 * distance + 1)
    has_border = (mirrored >= 0) & (mirrored < length)
    angle = math.pi / 4 * (1 - (2 * distance.double() + 1) / block)
    angle = angle.where(has_border, 0.0)
    sine = angle.sin() * torch.where(is_right, -1.0, 1.0)
    return mirrored.where(has_border, pixel), angle.cos(), sine
