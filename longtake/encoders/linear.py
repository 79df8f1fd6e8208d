"""A linear video autoencoder: principal components of space-time blocks of the clips that it was fitted on.

`BlockStatistics` takes the sums of blocks, `principal_components` makes the weights of them. The first frame of a video
is a block by itself where `first_alone` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.autoencoder_config import LinearConfig
from longtake.encoders.blocks import cut_frames, fill_block, folded
from longtake.random import Purpose, uniforms

_OVERSAMPLED, _ITERATIONS = 1.5, 6  # of the subspace iteration: it finds the variance of all components to 1e-6
_LEAST_SPREAD = 1e-3  # of the largest standard deviation: components that few clips decide are not blown up


class BlockComponents(nn.Module):
    """Blocks `[..., D]` <-> latents `[..., C]`: `(block - mean) @ basis.T * scale`."""

    def __init__(self, channels: int, block_size: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(block_size))
        self.basis = nn.Parameter(torch.empty(channels, block_size))  # orthonormal rows
        self.scale = nn.Parameter(torch.empty(channels))

    def forward(self, blocks: Tensor) -> Tensor:
        return (blocks.float() - self.mean) @ self.basis.T * self.scale

    def invert(self, latents: Tensor) -> Tensor:
        """Return the blocks that the latents stand for."""
        return (latents.float() / self.scale) @ self.basis + self.mean


class LinearAutoencoder(Autoencoder):
    """Projects blocks of `temporal` x `spatial` x `spatial` pixels onto their principal components, in float32.

    Blocks overlap with `overlap`, in a frame and in time, and a clip shorter than a block is slowed down to fill it, as
    in `PixelAutoencoder`.
    """

    is_random = False

    def __init__(self, config: LinearConfig, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        with torch.device("meta"):
            parts = {"blocks": BlockComponents(config.channels, config.block_size)}
            if config.first_alone:
                parts["first"] = BlockComponents(config.channels, config.frame_size)
        self.encoding: Mapping[str, nn.Module] = parts

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] -> "mean" `[B, C, F, h, w]`, float32: the latents, never drawn."""
        blocks = split_blocks(self.config, video)
        latents = [self.encoding[name](value) for name, value in blocks.items()]
        return {"mean": torch.cat(latents, dim=1).movedim(-1, 1)}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents `[B, C, F, h, w]` -> `[B, 3, T, H, W]` in [-1, 1]; of a clip shorter than a block the frames that fit
        the block best."""
        cells, first = latents.movedim(1, -1), int(self.config.first_alone)
        blocks = {"first": cells[:, :1]} if first else {}
        if cells.shape[1] > first:
            blocks["blocks"] = cells[:, first:]
        pixels = {name: self.encoding[name].invert(value) for name, value in blocks.items()}
        return join_blocks(self.config, pixels, num_frames).clamp(-1, 1)


def split_blocks(config: LinearConfig, video: Tensor) -> dict[str, Tensor]:
    """Return the blocks of pixels `[B, 3, T, H, W]` by part, "first" first, `[B, F, h, w, D]`, D in the order (c, t, y,
    x)."""
    first = int(config.first_alone)
    parts = {"first": video[:, :, :1]} if first else {}
    if video.shape[2] > first:
        parts["blocks"] = video[:, :, first:]
    return {name: _split(config, part, 1 if name == "first" else config.temporal) for name, part in parts.items()}


def join_blocks(config: LinearConfig, blocks: Mapping[str, Tensor], num_frames: int) -> Tensor:
    """Return the pixels of which these are the blocks, the first `num_frames` frames."""
    first = int(config.first_alone)
    parts = []
    for name, value in blocks.items():
        frames = 1 if name == "first" else num_frames - first
        parts.append(_join(config, value, 1 if name == "first" else config.temporal, frames))
    return torch.cat(parts, dim=2)


def _split(config: LinearConfig, video: Tensor, temporal: int) -> Tensor:
    side = config.spatial
    video = fill_block(video, temporal)
    if config.overlap:
        for dim, block in ((2, temporal), (3, side), (4, side)):
            video = folded(video, dim, block)
    b, c, t, height, width = video.shape
    blocks = video.reshape(b, c, t // temporal, temporal, height // side, side, width // side, side)
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)


def _join(config: LinearConfig, blocks: Tensor, temporal: int, num_frames: int) -> Tensor:
    b, f, h, w, _ = blocks.shape
    side = config.spatial
    video = blocks.reshape(b, f, h, w, 3, temporal, side, side).permute(0, 4, 1, 5, 2, 6, 3, 7)
    video = video.reshape(b, 3, f * temporal, h * side, w * side)
    if config.overlap:
        for dim, block in ((2, temporal), (3, side), (4, side)):
            video = folded(video, dim, block, inverse=True)
    return cut_frames(video, num_frames, temporal)


class BlockStatistics:
    """Sums over blocks of one part, float64: their number, mean and covariance."""

    def __init__(self, block_size: int) -> None:
        self.sums = torch.zeros(1 + block_size, 1 + block_size, dtype=torch.float64)  # of [1, block] times itself

    def add(self, blocks: Tensor) -> None:
        """Take in blocks `[N, D]`."""
        rows = torch.cat([torch.ones(len(blocks), 1, dtype=torch.float64), blocks.double()], dim=1)
        self.sums.addmm_(rows.T, rows)

    @property
    def count(self) -> int:
        return int(self.sums[0, 0])

    @property
    def mean(self) -> Tensor:
        return self.sums[0, 1:] / self.count

    @property
    def covariance(self) -> Tensor:
        return self.sums[1:, 1:] / self.count - torch.outer(self.mean, self.mean)


def principal_components(statistics: BlockStatistics, config: LinearConfig) -> dict[str, Tensor]:
    """Return the weights of `BlockComponents`, float32, components by falling variance; the signs make each one's
    largest number positive.

    `scale` divides a component by its standard deviation to the power `whitening`, then all alike, so that the mean
    variance of the latents is 1.
    """
    basis, variance = _largest(statistics.covariance, config.channels)
    signs = basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
    largest = variance[0].clamp_min(1e-12).sqrt()
    spread = variance.clamp_min(0.0).sqrt().clamp_min(_LEAST_SPREAD * largest)
    scale = spread**-config.whitening
    scale = scale / (spread * scale).square().mean().sqrt()
    found = {"mean": statistics.mean, "basis": basis * signs, "scale": scale}
    return {name: value.float().contiguous() for name, value in found.items()}


def _largest(covariance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors `[count, D]` of the largest eigenvalues, and these, falling."""
    size = len(covariance)
    wanted = min(size, int(_OVERSAMPLED * count) + 16)
    if 2 * wanted > size:
        values, vectors = torch.linalg.eigh(covariance)
    else:  # subspace iteration: a third of the time of all eigenvectors of 3,072 numbers
        start = uniforms(0, 0, Purpose.AUTOENCODER, 0, np.arange(size), wanted) - 0.5
        space = torch.linalg.qr(torch.from_numpy(start).double()).Q
        for _ in range(_ITERATIONS):
            space = torch.linalg.qr(covariance @ space).Q
        values, small = torch.linalg.eigh(space.T @ covariance @ space)
        vectors = space @ small
    return vectors.flip(1)[:, :count].T, values.flip(0)[:count]


def psnr_of_round_trip(autoencoder: Autoencoder, videos: Sequence[Tensor]) -> list[float]:
    """PSNR in dB of each clip of `[B, 3, T, H, W]` in [-1, 1] that was encoded and decoded."""
    found: list[float] = []
    with torch.no_grad():
        for video in videos:
            decoded = autoencoder.decode(autoencoder.posterior(video)["mean"], video.shape[2])
            error = (decoded - video).square().mean(dim=(1, 2, 3, 4)).double().clamp_min(1e-10)
            found += (10 * (4 / error).log10()).tolist()
    return found
