"""CogVideoX's autoencoder, through diffusers: chunks of frames that share a cache, whole or in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.encoders.autoencoder_config import CogVideoXVAEConfig
from longtake.encoders.causal_layers import repeated
from longtake.encoders.extras import needs_extra
from longtake.encoders.kl import KLAutoencoder, frozen_on_meta
from longtake.encoders.streamed import StreamedAutoencoder

# The weights were trained on chunks of so many frames, over which the normalisation takes its means: other lengths give
# other videos.
_FRAMES, _LATENTS = 8, 2
_STREAMED = 48  # frames that are on the device at once


class CogVideoXAutoencoder(StreamedAutoencoder):
    """4k+1 frames -> k+1 latent frames, any number of them: CogVideoX 1.5 wants an even one, so 85 frames or a multiple
    of 8 less."""

    original_name = staticmethod(str)

    def _chunk_lengths(self, num_frames: int) -> list[int]:
        """Chunks of about a segment of `_STREAMED` frames; the first has what is over."""
        size = self.config.encode_frames or _FRAMES
        return [span.stop - span.start for span in chunks(num_frames, max(size, _STREAMED // size * size))]

    def _encode_part(self, video: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Moments of the next frames of a video; cache: of those before."""
        found = []
        for span in chunks(video.shape[2], self.config.encode_frames or _FRAMES):
            encoded, cache = self.model.encoder(video[:, :, span].to(self.dtype), conv_cache=cache)
            found.append(encoded)
        return torch.cat(found, dim=2), cache

    @torch.no_grad()
    def _decoded_parts(self, tile: Tensor) -> Iterator[Tensor]:
        """`_decoded` of a tile, chunk by chunk."""
        cache = None
        for span in self._decoded_spans(tile.shape[2]):
            decoded, cache = self._decode_part(tile, span, cache)
            yield decoded

    def _decoded_spans(self, num_latents: int) -> Iterator[slice]:
        return chunks(num_latents, _LATENTS, 1 if self.config.first_latent_alone else None)

    def _decode_part(self, z: Tensor, span: slice, cache: Any) -> tuple[Tensor, Any]:
        for layer in self.model.modules():
            if isinstance(layer, Upsample):
                layer.is_start = span.start == 0
        return self.model.decoder(z[:, :, span], conv_cache=cache)


def chunks(length: int, size: int, first: int | None = None) -> Iterator[slice]:
    """Chunks of `size` frames after one of `first`; by default the first one has what is over beside its own."""
    stop = min(length, size + length % size if first is None else first)
    yield slice(0, stop)
    for start in range(stop, length, size):
        yield slice(start, min(length, start + size))


class Upsample(nn.Module):
    """diffusers' layer: each cell repeated, then a convolution of each frame.

    In time all frames are repeated but the first of a video; diffusers' own takes the first of each odd chunk for that,
    and so gives even numbers of latent frames three frames too many.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.time, self.is_start = layer.conv, 2 if layer.compress_time else 1, True

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, F, h, w]` -> `[B, C, F, 2 F or 2 F - 1, 2 h, 2 w]`."""
        alone = int(self.is_start)
        parts = repeated(x[:, :, :alone], (1, 2, 2)), repeated(x[:, :, alone:], (self.time, 2, 2))
        frames = torch.cat(parts, dim=2).transpose(1, 2)
        return self.conv(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)


class Downsample(nn.Module):
    """diffusers' layer: pairs of frames averaged, an odd first one apart, then a convolution of each frame.

    diffusers copies the whole tensor with time last to average it, and once more to make frames samples.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.halves_time = layer.conv, layer.compress_time

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, F, h, w]` -> `[B, C, F or ceil(F / 2), h / 2, w / 2]`."""
        if self.halves_time and x.shape[2] > 1:
            alone = x.shape[2] % 2
            pooled = (x[:, :, alone::2] + x[:, :, alone + 1 :: 2]) / 2
            x = torch.cat([x[:, :, :1], pooled], dim=2) if alone else pooled
        frames = F.pad(x.transpose(1, 2), (0, 1, 0, 1))  # in the order of frames, so that flattening copies nothing
        return self.conv(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)


_LAYERS = {"CogVideoXUpsample3D": Upsample, "CogVideoXDownsample3D": Downsample}  # diffusers' -> ours


def cogvideox_module(config: CogVideoXVAEConfig) -> nn.Module:
    """diffusers' autoencoder with these layers, on the current default device."""
    model = diffusers_cogvideox(config)
    for name, layer in list(model.named_modules()):
        if (kind := _LAYERS.get(type(layer).__name__)) is not None:
            model.set_submodule(name, kind(layer))
    return model


def diffusers_cogvideox(config: CogVideoXVAEConfig) -> nn.Module:
    """diffusers' autoencoder as it is, on the current default device."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKLCogVideoX
    levels = len(config.block_out_channels)
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * levels,
        up_block_types=("CogVideoXUpBlock3D",) * levels,
        block_out_channels=config.block_out_channels,
        latent_channels=config.latent_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_num_groups,
    )


def build(config: CogVideoXVAEConfig, dtype: torch.dtype) -> KLAutoencoder:
    """Return the autoencoder of a section on the meta device, to be filled with weights."""
    return CogVideoXAutoencoder(config, frozen_on_meta(cogvideox_module, config, dtype), dtype)
