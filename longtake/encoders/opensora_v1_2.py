"""Open-Sora 1.2's autoencoder: SDXL's for each frame, through diffusers, and one in time over its latents.

The part in time is causal: a frame sees those before it. A chunk whose length is no multiple of 4 is filled up with
zeros in front, and what is decoded from them is dropped. Module names are those of the published files, but for the
prefix of each part. Published runs draw the latents of frames from their posterior, too; here their mean is taken, and
only those of the whole are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.encoders.autoencoder import ChunkedAutoencoder
from longtake.encoders.extras import needs_extra
from longtake.encoders.kl import frozen_on_meta
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.parallel.compile import compile_layers
from longtake.parallel.shared_work import Tile
from longtake.transfer import to_device

_HALVES = (False, True, True)  # whether time is halved after each level but the last
_LOGVAR = (-30.0, 20.0)
_PARTS = {  # of ours -> what its tensors begin with in published files
    "spatial_encoder": "spatial_vae.module.encoder",
    "spatial_quant": "spatial_vae.module.quant_conv",
    "temporal_encoder": "temporal_vae.encoder",
    "temporal_quant": "temporal_vae.quant_conv",
    "temporal_decoder": "temporal_vae.decoder",
    "temporal_post_quant": "temporal_vae.post_quant_conv",
    "spatial_decoder": "spatial_vae.module.decoder",
    "spatial_post_quant": "spatial_vae.module.post_quant_conv",
}
_SPATIAL = "spatial_vae.module."
_WHOLE = _SPATIAL, "temporal_vae."  # beginnings of names in a file of all parts
_CONSTANTS = ("scale", "shift")  # which the section says


class OpenSoraAutoencoder(nn.Module, ChunkedAutoencoder):
    """Chunks are pieces of their own; latents are (z - shift) / scale of each channel."""

    def __init__(self, config: OpenSoraVAEConfig, parts: nn.Module, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        ChunkedAutoencoder.__init__(self, config, dtype)
        self.parts, self.dtype, self.is_random = parts, dtype, config.posterior == "sample"
        own = dict(parts.named_children())
        self.encoding = {name: part for name, part in own.items() if not name.endswith(("decoder", "post_quant"))}
        self.decoding = {name: part for name, part in own.items() if name not in self.encoding}
        self.compute = lambda tiles: [tile.run() for tile in tiles]
        if config.compile:
            names = "ResnetBlock2D", "TimeBlock"
            compile_layers([layer for layer in parts.modules() if type(layer).__name__ in names])

    def names(self, files: Collection[str]) -> dict[str, str]:
        """As the parts call them -> as published files do."""
        found = {}
        for name in files:
            whole = name if name.startswith(_WHOLE) else f"{_SPATIAL}{name}"  # of SDXL's alone
            part = next((part for part, prefix in _PARTS.items() if whole.startswith(f"{prefix}.")), None)
            if part in self.parts:
                found[part + whole.removeprefix(_PARTS[part])] = name
            elif part is None and name not in _CONSTANTS:
                found[name] = name
        return found

    @torch.no_grad()
    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        chunks = video.split(self.stream_frames, dim=2)
        pieces = [chunk.split(self._samples_at_once(chunk.shape[2])) for chunk in chunks]
        done = iter(self.compute([self._piece(piece) for of_chunk in pieces for piece in of_chunk]))
        moments = torch.cat([torch.cat([next(done) for _ in of_chunk]) for of_chunk in pieces], dim=2)
        mean, logvar = moments.float().chunk(2, dim=1)
        shift, scale = self._constants(mean)
        found = {"mean": (mean - shift) / scale}
        if self.is_random:
            found["std"] = torch.exp(0.5 * logvar.clamp(*_LOGVAR)) / scale.abs()
        return found

    def posterior_of_chunk(self, video: Tensor) -> dict[str, Tensor]:
        return self.posterior(video)

    @torch.no_grad()
    def decode_chunk(self, latents: Tensor, num_frames: int) -> Tensor:
        self.load_decoder()
        shift, scale = self._constants(latents)
        z, count = (latents.float() * scale + shift).to(self.dtype), self._samples_at_once(num_frames)
        tiles = [Tile(partial(self._decoded, one, num_frames), self._shape(one, num_frames)) for one in z.split(count)]
        return torch.cat(self.compute(tiles)).float().clamp(-1, 1)

    def decode_stream(self, latents: Tensor, num_frames: int) -> Iterator[Tensor]:
        """Chunk by chunk; the borders of chunks blended where the section asks for it."""
        before = None
        for after in super().decode_stream(latents, num_frames):
            if before is not None and self.config.blend_chunks:
                before, after = self.blended(before, after)
            if before is not None:
                yield before
            before = after
        yield before

    def blended(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Two chunks [B, 3, t, H, W] with what the autoencoder makes of the frames around their border, taken as one
        chunk: all of it at the border, less with every frame away from it."""
        half = self.stream_frames // 2
        own, theirs = before[:, :, -half:], after[:, :, : self.stream_frames - half]
        frames = torch.cat([own, theirs], dim=2)
        again = self.decode_chunk(self.posterior(frames)["mean"], frames.shape[2])
        counts = own.shape[2], theirs.shape[2]
        share = torch.cat(
            [(torch.arange(counts[0]) + 0.5) / counts[0], 1 - (torch.arange(counts[1]) + 0.5) / counts[1]]
        )
        mixed = frames + share.to(frames)[:, None, None] * (again - frames)
        own, theirs = mixed.split(counts, dim=2)
        return torch.cat([before[:, :, : -counts[0]], own], 2), torch.cat([theirs, after[:, :, counts[1] :]], 2)

    def frame_moments(self, frames: Tensor) -> Tensor:
        """Frames [B, 3, t, H, W] -> mean and log variance [B, 8, t, h, w] of SDXL's latents, not scaled yet."""
        flat = frames.to(self.dtype).transpose(1, 2).flatten(0, 1)
        parts = [
            self.parts.spatial_quant(self.parts.spatial_encoder(some))
            for some in flat.split(self.config.micro_batch_size)
        ]
        return torch.cat(parts).unflatten(0, (len(frames), -1)).transpose(1, 2)

    def moments(self, latents: Tensor) -> Tensor:
        """Scaled latents of the frames of a chunk [B, 4, t, h, w] -> mean and log variance [B, 8, F, h, w]."""
        front = -latents.shape[2] % self.latent.temporal
        return self.parts.temporal_quant(self.parts.temporal_encoder(F.pad(latents, (0, 0, 0, 0, front, 0))))

    def _samples_at_once(self, num_frames: int) -> int:
        """How many samples of so many frames are a piece: several stills or short chunks, one of a whole chunk."""
        return max(1, self.config.micro_batch_size // num_frames)

    def _piece(self, chunk: Tensor) -> Tile:
        channels, *cells = self.latent(*chunk.shape[2:])

        def run() -> Tensor:
            mean, logvar = self.frame_moments(chunk).chunk(2, dim=1)
            scale = self.config.spatial_scale
            if self.config.spatial_only:
                return torch.cat([mean * scale, logvar + 2 * math.log(scale)], dim=1)
            return self.moments(mean * scale)

        return Tile(run, (len(chunk), 2 * channels, *cells))

    def latents_of_frames(self, z: Tensor, num_frames: int) -> Tensor:
        """Latents of a chunk, neither shifted nor scaled -> those of its frames, scaled."""
        if self.config.spatial_only:
            return z
        frames = self.parts.temporal_decoder(self.parts.temporal_post_quant(z))
        return frames[:, :, frames.shape[2] - num_frames :]

    def _decoded(self, z: Tensor, num_frames: int) -> Tensor:
        flat = (self.latents_of_frames(z, num_frames) / self.config.spatial_scale).transpose(1, 2).flatten(0, 1)
        parts = [
            self.parts.spatial_decoder(self.parts.spatial_post_quant(some))
            for some in flat.split(self.config.micro_batch_size)
        ]
        return torch.cat(parts).unflatten(0, (len(z), -1)).transpose(1, 2)

    def _shape(self, z: Tensor, num_frames: int) -> tuple[int, ...]:
        side = self.latent.spatial
        return len(z), 3, num_frames, z.shape[3] * side, z.shape[4] * side

    def _constants(self, like: Tensor) -> list[Tensor]:
        numbers = self.config.latent_shift, self.config.latent_scale
        if self.config.spatial_only:
            numbers = (0.0,) * len(numbers[0]), (1.0,) * len(numbers[1])
        columns = [torch.tensor(of, dtype=torch.float32)[:, None, None, None] for of in numbers]
        return [to_device(column, like.device) for column in columns]


class TimeConv(nn.Module):
    """A convolution over frames, rows and columns that sees no later frame: [B, C, T, h, w]."""

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        side = kernel // 2
        self.padding = (side, side, side, side, kernel - stride, 0)
        self.conv = nn.Conv3d(channels, out, kernel, (stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.padding))


class TimeBlock(nn.Module):
    """A residual block of such convolutions."""

    def __init__(self, channels: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, out)
        self.conv1, self.conv2 = TimeConv(channels, out, bias=False), TimeConv(out, out, bias=False)
        self.conv3 = nn.Identity() if channels == out else TimeConv(channels, out, kernel=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def _blocks(count: int, channels: int, out: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(TimeBlock(out if number else channels, out, groups) for number in range(count))


class TimeEncoder(nn.Module):
    """Latents of frames [B, 4, 4F, h, w] -> [B, 8, F, h, w]."""

    def __init__(self, config: OpenSoraVAEConfig) -> None:
        super().__init__()
        widths = [config.filters * factor for factor in config.channel_multipliers]
        count, groups, channels = config.num_res_blocks, config.num_groups, config.latent.channels
        self.conv_in = TimeConv(channels, config.filters, bias=False)
        entering = [config.filters, *widths]
        self.block_res_blocks = nn.ModuleList(
            _blocks(count, *pair, groups) for pair in zip(entering, widths, strict=False)
        )
        self.conv_blocks = nn.ModuleList(
            TimeConv(width, width, stride=2) if halves else nn.Identity()
            for width, halves in zip(widths, _HALVES, strict=False)
        )
        self.res_blocks = _blocks(count, widths[-1], widths[-1], groups)
        self.norm1 = nn.GroupNorm(groups, widths[-1])
        self.conv2 = TimeConv(widths[-1], 2 * channels, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level, blocks in enumerate(self.block_res_blocks):
            x = _through(blocks, x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        return self.conv2(F.silu(self.norm1(_through(self.res_blocks, x))))


class TimeDecoder(nn.Module):
    """Latents [B, 4, F, h, w] -> those of frames [B, 4, 4F, h, w]."""

    def __init__(self, config: OpenSoraVAEConfig) -> None:
        super().__init__()
        widths = [config.filters * factor for factor in config.channel_multipliers]
        count, groups, channels = config.num_res_blocks, config.num_groups, config.latent.channels
        self.conv1 = TimeConv(channels, widths[-1])
        self.res_blocks = _blocks(count, widths[-1], widths[-1], groups)
        entering = [*widths[1:], widths[-1]]  # levels run from the last to the first
        self.block_res_blocks = nn.ModuleList(
            _blocks(count, *pair, groups) for pair in zip(entering, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            TimeConv(width, 2 * width) if halves else nn.Identity()
            for width, halves in zip(widths[1:], _HALVES, strict=True)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0])
        self.conv_out = TimeConv(widths[0], channels)

    def forward(self, x: Tensor) -> Tensor:
        x = _through(self.res_blocks, self.conv1(x))
        for level in reversed(range(len(self.block_res_blocks))):
            x = _through(self.block_res_blocks[level], x)
            if level and _HALVES[level - 1]:
                x = self.conv_blocks[level - 1](x).unflatten(1, (-1, 2))  # every channel has two frames
                x = x.transpose(2, 3).flatten(2, 3)
        return self.conv_out(F.silu(self.norm1(x)))


def _through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def diffusers_spatial(config: OpenSoraVAEConfig) -> nn.Module:
    """diffusers' autoencoder of single frames, on the current default device."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKL
    levels = len(config.block_out_channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=config.block_out_channels,
        layers_per_block=config.layers_per_block,
        latent_channels=config.latent.channels,
        norm_num_groups=config.norm_num_groups,
    )


def modules(config: OpenSoraVAEConfig) -> nn.Module:
    """All parts, on the current default device."""
    spatial, channels = diffusers_spatial(config), config.latent.channels
    parts = {
        "spatial_encoder": spatial.encoder,
        "spatial_quant": spatial.quant_conv,
        "temporal_encoder": TimeEncoder(config),
        "temporal_quant": TimeConv(2 * channels, 2 * channels, kernel=1),
        "temporal_decoder": TimeDecoder(config),
        "temporal_post_quant": TimeConv(channels, channels, kernel=1),
        "spatial_decoder": spatial.decoder,
        "spatial_post_quant": spatial.post_quant_conv,
    }
    left_out = "temporal_" if config.spatial_only else "-"
    return nn.ModuleDict({name: part for name, part in parts.items() if not name.startswith(left_out)})


def build(config: OpenSoraVAEConfig, dtype: torch.dtype) -> OpenSoraAutoencoder:
    """Return the autoencoder of a section on the meta device, to be filled with weights."""
    return OpenSoraAutoencoder(config, frozen_on_meta(modules, config, dtype), dtype)
