"""Wan's autoencoders of 2.1 and 2.2, through diffusers: frame by latent frame, with diffusers' caches.

The modules are diffusers' own. Its `encode` and `decode` are not used: they drop frames beyond 4k+1 silently, keep the
caches on the module, and copy all earlier frames with each new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.encoders.extras import needs_extra
from longtake.encoders.kl import KLAutoencoder, frozen_on_meta
from longtake.encoders.streamed import StreamedAutoencoder
from longtake.encoders.tiles import Tiling
from longtake.encoders.wan_config import WanVAEConfig
from longtake.encoders.wan_names import wan_names
from longtake.transfer import to_device

_STREAMED = 16  # frames that are on the device at once, beyond the first
_CACHED = "WanCausalConv3d"  # diffusers' layers that have a place in a list of caches


class WanAutoencoder(StreamedAutoencoder):
    """4k+1 frames -> k+1 latent frames; further frames are left out, as in Wan's own code (`WanVAEConfig.check` refuses
    such lengths). Latents are (z - mean) / std of each channel."""

    compiled = "RMS_norm"  # residual blocks write into a list of caches, which a compiler would guard on

    def __init__(self, config: WanVAEConfig, model: nn.Module, dtype: torch.dtype) -> None:
        self.original_name = wan_names(config.version, config.num_res_blocks)
        super().__init__(config, model, dtype)

    def scaling(self, like: Tensor) -> tuple[Tensor, Tensor]:
        std = torch.tensor(self.config.latents_std, dtype=torch.float32)
        mean = torch.tensor(self.config.latents_mean, dtype=torch.float32)
        shift, scale = (to_device(value[:, None, None, None], like.device) for value in (mean, 1 / std))
        return shift, scale

    def _tilings(self) -> tuple[Tiling, Tiling]:
        """Return the tiles of frames, and the same in latent cells, for encoding."""
        fold, cell = self.config.fold, self.latent.spatial
        rows, columns = (side * fold for side in self.config.tile_sides)
        row_stride, column_stride = (stride * fold for stride in self.config.tile_strides)
        if not self.config.use_tiling:
            return super()._tilings()
        pixels = Tiling(None, 1, (rows, columns), (row_stride, column_stride), least=self.config.tile_sides)
        cells = Tiling(None, 1, (rows // cell, columns // cell), (row_stride // cell, column_stride // cell))
        return pixels, cells

    def _decoding_tilings(self) -> tuple[Tiling, Tiling]:
        """Return the tiles of latent cells, and the same in what the decoder gives."""
        pixels, cells = super()._tilings()
        if pixels.sides is None:
            return cells, pixels
        fold = self.config.fold
        rows, columns = (side // fold for side in pixels.sides)
        row_stride, column_stride = (stride // fold for stride in pixels.side_strides)
        return cells, Tiling(None, 1, (rows, columns), (row_stride, column_stride))

    def _chunk_lengths(self, num_frames: int) -> list[int]:
        """One frame and a few parts of the encoder, then a few parts each; the last has what is left over."""
        whole = num_frames - (num_frames - 1) % self.latent.temporal
        lengths = [min(1 + _STREAMED, whole)]
        lengths += [min(_STREAMED, whole - start) for start in range(1 + _STREAMED, whole, _STREAMED)]
        lengths[-1] += num_frames - whole
        return lengths

    def _encode_part(self, video: Tensor, cache: Any) -> tuple[Tensor, Any]:
        first = 1 if cache is None else self.latent.temporal
        if cache is None:
            cache = _empty_cache(self.model.encoder)
        moments = []
        for stop in range(first, video.shape[2] + 1, self.latent.temporal):
            frames = video[:, :, max(0, stop - self.latent.temporal) : stop]
            frames = self._folded(frames.to(self.dtype))
            moments.append(self.model.quant_conv(self.model.encoder(frames, feat_cache=cache, feat_idx=[0])))
        return torch.cat(moments, dim=2), cache

    @torch.no_grad()
    def _decoded_parts(self, tile: Tensor) -> Iterator[Tensor]:
        cache = _empty_cache(self.model.decoder)
        for span in self._decoded_spans(tile.shape[2]):
            z = self.model.post_quant_conv(tile[:, :, span])
            yield self.model.decoder(z, feat_cache=cache, feat_idx=[0], first_chunk=span.start == 0)

    def _decoded_spans(self, num_latents: int) -> Iterator[slice]:
        return (slice(frame, frame + 1) for frame in range(num_latents))

    def _as_pixels(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what the decoder gives: squares of pixels are channels."""
        b, _, f, h, w = super()._as_pixels(shape)
        fold = self.config.fold
        return b, 3 * fold**2, f, h // fold, w // fold

    def _folded(self, video: Tensor) -> Tensor:
        """`[B, 3, T, H, W]` -> `[B, 3 fold², T, H / fold, W / fold]`, channels in the order colour, column, row."""
        if self.config.fold == 1:
            return video
        frames = video.transpose(1, 2).transpose(3, 4)
        return F.pixel_unshuffle(frames, self.config.fold).transpose(3, 4).transpose(1, 2)

    def _unfolded(self, decoded: Tensor) -> Tensor:
        if self.config.fold == 1:
            return decoded
        frames = decoded.transpose(1, 2).transpose(3, 4)
        return F.pixel_shuffle(frames, self.config.fold).transpose(3, 4).transpose(1, 2)


def _empty_cache(part: nn.Module) -> list[Any]:
    """Return the caches of an encoder or decoder at the beginning of a video; each call writes into them."""
    return [None] * sum(type(layer).__name__ == _CACHED for layer in part.modules())


def wan_module(config: WanVAEConfig) -> nn.Module:
    """diffusers' autoencoder, on the current default device."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKLWan
    fold = config.fold
    return AutoencoderKLWan(
        base_dim=config.base_dim,
        decoder_base_dim=config.decoder_base_dim,
        z_dim=config.latent_channels,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.num_res_blocks,
        latents_mean=list(config.latents_mean),
        latents_std=list(config.latents_std),
        is_residual=config.version == "2.2",
        in_channels=3 * fold**2,
        out_channels=3 * fold**2,
        patch_size=None if fold == 1 else fold,
        scale_factor_spatial=config.latent.spatial,
    )


def build(config: WanVAEConfig, dtype: torch.dtype) -> KLAutoencoder:
    """Return the autoencoder of a section on the meta device, to be filled with weights."""
    return WanAutoencoder(config, frozen_on_meta(wan_module, config, dtype), dtype)
