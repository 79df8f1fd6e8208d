"""Learned autoencoders whose posterior is a normal distribution, through diffusers: HunyuanVideo's and FLUX's.

Those that carry a cache through a video derive from `streamed.py`: `cogvideox.py` and `wan.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.autoencoder_config import (
    Autoencoder2DConfig,
    AutoencoderSection,
    CogVideoXVAEConfig,
    HunyuanVAEConfig,
)
from longtake.encoders.causal_layers import lighten
from longtake.encoders.extras import needs_extra
from longtake.encoders.files import autoencoder_names, flux_name
from longtake.encoders.tiles import Box, Tiling
from longtake.encoders.wan_config import WanVAEConfig
from longtake.parallel.compile import compile_layers
from longtake.parallel.shared_work import Tile

TiledConfig = HunyuanVAEConfig | CogVideoXVAEConfig | WanVAEConfig
_LONGEST, _OVERLAP = 384, 64  # of equal tiles, in pixels: 256px is whole at 16:9, and neighbours share what 256 / 4 is
MOST_ELEMENTS = 2**31 - 1  # of one tensor in a convolution


class KLAutoencoder(nn.Module, Autoencoder):
    """What they have in common: `model` is diffusers' autoencoder; latents are (z - shift) * scale."""

    original_name: Callable[[str], str]  # diffusers' name of a tensor -> its name in original files
    compiled: ClassVar[str] = "Resnet"  # in the names of the classes of layers that `ae.compile` compiles

    def __init__(self, config: Autoencoder2DConfig | TiledConfig, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.model, self.dtype = config, model, dtype
        self.is_random = config.is_random
        parts = dict(model.named_children())
        self.encoding = {name: parts[name] for name in ("encoder", "quant_conv") if name in parts}
        self.decoding = {name: parts[name] for name in ("decoder", "post_quant_conv") if name in parts}
        self.compute = run_in_turn
        if config.compile:
            compile_layers([layer for layer in model.modules() if self.compiled in type(layer).__name__])

    def names(self, files: Collection[str]) -> dict[str, str]:
        """As diffusers calls them -> as the file does, in either layout."""
        return autoencoder_names(files, self.model.state_dict(), self.original_name)

    @torch.no_grad()
    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] -> "mean" and, for a posterior that is drawn from, "std": float32
        `[B, C, F, h, w]`, scaled and shifted as latents are."""
        return self._as_posterior(self._raw_posterior(video))

    def _as_posterior(self, moments: Tensor) -> dict[str, Tensor]:
        """Of mean and log variance [B, 2 C, F, h, w] as the weights give them."""
        mean, logvar = moments.float().chunk(2, dim=1)
        shift, scale = self.scaling(mean)
        posterior = {"mean": (mean - shift) * scale}
        if self.is_random:
            posterior["std"] = torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * scale
        return posterior

    @torch.no_grad()
    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents `[B, C, F, h, w]` -> float32 `[B, 3, T, H, W]` in [-1, 1], of the first `num_frames` frames."""
        self.load_decoder()
        return self._decoded(self._unscaled(latents))[:, :, :num_frames].float().clamp(-1, 1)

    def _unscaled(self, latents: Tensor) -> Tensor:
        """Latents as the weights know them."""
        shift, scale = self.scaling(latents)
        return (latents.float() / scale + shift).to(self.dtype)

    def scaling(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Shift and scale of latents, on the device of `like`: numbers, or one for each channel `[C, 1, 1, 1]`."""
        return self.config.shift_factor, self.config.scale_factor

    @abstractmethod
    def _raw_posterior(self, video: Tensor) -> Tensor:
        """Pixels -> mean and log variance `[B, 2C, F, h, w]` of the posterior, unscaled."""

    @abstractmethod
    def _decoded(self, z: Tensor) -> Tensor:
        """Unscaled latents -> `[B, 3, T, H, W]`."""


def _run_box(run: Callable[[Tensor], Tensor], group: Tensor, box: Box) -> Tensor:
    return run(group[:, :, *box])


def run_in_turn(tiles: Sequence[Tile]) -> list[Tensor]:
    """All tiles, on this rank."""
    return [tile.run() for tile in tiles]


class TiledAutoencoder(KLAutoencoder):
    """4k+1 frames -> k+1 latent frames, each of which sees no later frame.

    Samples are encoded and decoded in groups, large frames in overlapping tiles that are blended.
    """

    @abstractmethod
    def _tilings(self) -> tuple[Tiling, Tiling]:
        """Return the tiles of frames, and the same in latent cells."""

    @abstractmethod
    def _samples_at_once(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        """How many samples of (T, H, W) pixels are encoded together, and how many are decoded together."""

    @abstractmethod
    def _encode_tile(self, tile: Tensor) -> Tensor:
        """`_raw_posterior` of a tile."""

    @abstractmethod
    def _decode_tile(self, tile: Tensor) -> Tensor:
        """`_decoded` of a tile."""

    def _raw_posterior(self, video: Tensor) -> Tensor:
        groups = video.split(self._samples_at_once(video.shape[2:])[0])
        pixels, cells = self._tilings()
        return torch.cat(self._by_tiles(groups, self._encode_tile, pixels, cells, self._encoded))

    def _decoding_tilings(self) -> tuple[Tiling, Tiling]:
        """Return the tiles of latent cells, and the same in frames."""
        pixels, cells = self._tilings()
        return cells, pixels

    def _decoded(self, z: Tensor) -> Tensor:
        groups = z.split(self._samples_at_once(self._as_pixels(tuple(z.shape))[2:])[1])
        cells, pixels = self._decoding_tilings()
        return torch.cat(self._by_tiles(groups, self._decode_tile, cells, pixels, self._as_pixels))

    def _by_tiles(
        self,
        groups: Sequence[Tensor],
        run: Callable[[Tensor], Tensor],
        cut: Tiling,
        join: Tiling,
        shape: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> list[Tensor]:
        """What `run` makes of each of `groups` `[B, C, f, h, w]`, tile by tile, of which only the last may have fewer
        samples; `shape`: of its result."""
        planes = cut.cut(tuple(groups[0].shape[2:]))
        boxes = [box for rows in planes for columns in rows for box in columns]
        shapes = {
            len(group): [shape((*group.shape[:2], *(part.stop - part.start for part in box))) for box in boxes]
            for group in (groups[0], groups[-1])
        }
        tiles = [
            Tile(partial(_run_box, run, group, box), result)
            for group in groups
            for box, result in zip(boxes, shapes[len(group)], strict=True)
        ]
        done = iter(self.compute(tiles))
        return [join.join([[[next(done) for _ in row] for row in rows] for rows in planes]) for _ in groups]

    def _encoded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        channels, *cells = self.latent(*shape[2:])
        return shape[0], 2 * channels, *cells

    def _as_pixels(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        b, _, f, h, w = shape
        time, side = self.latent.temporal, self.latent.spatial
        return b, 3, (f - 1) * time + 1, h * side, w * side


class HunyuanAutoencoder(TiledAutoencoder):
    """Samples are encoded together as far as `piece_elements` allows, and decoded one by one; long clips are cut in
    time too where it is asked for."""

    original_name = staticmethod("vae.{}".format)

    def _tilings(self) -> tuple[Tiling, Tiling]:
        return hunyuan_tilings(self.config)

    def _samples_at_once(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        return samples_at_once(self.config, *shape), 1

    def _encode_tile(self, tile: Tensor) -> Tensor:
        return self.model.quant_conv(self.model.encoder(tile.to(self.dtype)))

    def _decode_tile(self, tile: Tensor) -> Tensor:
        return self.model.decoder(self.model.post_quant_conv(tile))


class ImageAutoencoder(KLAutoencoder):
    """Every frame by itself."""

    original_name = staticmethod(flux_name)

    def _raw_posterior(self, video: Tensor) -> Tensor:
        frames = video.to(self.dtype).transpose(1, 2).flatten(0, 1)  # [B T, 3, H, W]
        channels, _, height, width = self.latent(1, *video.shape[3:])
        shape = 1, 2 * channels, height, width
        encoded = self._by_frames(frames, lambda frame: self.model.encode(frame).latent_dist.parameters, shape)
        return encoded.unflatten(0, (len(video), -1)).transpose(1, 2)

    def _decoded(self, z: Tensor) -> Tensor:
        frames, side = z.transpose(1, 2).flatten(0, 1), self.latent.spatial
        shape = 1, self.config.in_channels, z.shape[3] * side, z.shape[4] * side
        decoded = self._by_frames(frames, lambda frame: self.model.decode(frame, return_dict=False)[0], shape)
        return decoded.unflatten(0, (len(z), -1)).transpose(1, 2)

    def _by_frames(self, frames: Tensor, run: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        """What `run` makes of each of `frames` `[n, C, h, w]`; `shape`: of one result, `[1, c, h, w]`."""
        return torch.cat(self.compute([Tile(partial(run, frame), shape) for frame in frames.split(1)]))


def samples_at_once(config: HunyuanVAEConfig, num_frames: int, height: int, width: int) -> int:
    """How many samples of `(T, H, W)` pixels are encoded together."""
    if config.use_temporal_tiling:
        num_frames = min(num_frames, config.sample_tsize + 1)
    if config.use_spatial_tiling:
        height, width = map(min, (height, width), _tile_sides(config)[0])
    most = min(config.piece_elements, MOST_ELEMENTS)
    return max(1, most // (num_frames * height * width * config.block_out_channels[0]))


def hunyuan_tilings(config: HunyuanVAEConfig) -> tuple[Tiling, Tiling]:
    """Return the tiles of frames, and the same in latent cells."""
    frame_stride = int(config.sample_tsize * (1 - config.tile_overlap_factor))
    sides, strides = _tile_sides(config)
    pixels, cells = (
        Tiling(
            config.sample_tsize // time if config.use_temporal_tiling else None,
            frame_stride // time,
            (sides[0] // cell, sides[1] // cell) if config.use_spatial_tiling else None,
            (strides[0] // cell, strides[1] // cell),
            config.latent.spatial // cell if config.sample_size == "auto" else None,
        )
        for time, cell in ((1, 1), (config.latent.temporal, config.latent.spatial))
    )
    return pixels, cells


def _tile_sides(config: HunyuanVAEConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a tile's longest sides, and the strides that go with these, in pixels."""
    if config.sample_size == "auto":
        return (_LONGEST,) * 2, (_LONGEST - _OVERLAP,) * 2
    stride = int(config.sample_size * (1 - config.tile_overlap_factor))
    return (config.sample_size,) * 2, (stride,) * 2


def hunyuan_module(config: HunyuanVAEConfig) -> nn.Module:
    """diffusers' autoencoder with lighter layers, on the current default device."""
    model = diffusers_hunyuan(config)
    lighten(model, config.piece_elements)
    return model


def diffusers_hunyuan(config: HunyuanVAEConfig) -> nn.Module:
    """diffusers' autoencoder as it is, on the current default device."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKLHunyuanVideo
    return AutoencoderKLHunyuanVideo(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_out_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_num_groups,
        scaling_factor=config.scale_factor,
    )


def image_module(config: Autoencoder2DConfig) -> nn.Module:
    """diffusers' FLUX autoencoder, on the current default device."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKL
    levels = len(config.ch_mult)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(config.ch * factor for factor in config.ch_mult),
        layers_per_block=config.num_res_blocks,
        latent_channels=config.z_channels,
        norm_num_groups=config.norm_num_groups,
        sample_size=config.resolution,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_kl(config: HunyuanVAEConfig | Autoencoder2DConfig, dtype: torch.dtype) -> KLAutoencoder:
    """Return the autoencoder of a section on the meta device, to be filled with weights."""
    if isinstance(config, HunyuanVAEConfig):
        return HunyuanAutoencoder(config, frozen_on_meta(hunyuan_module, config, dtype), dtype)
    return ImageAutoencoder(config, frozen_on_meta(image_module, config, dtype), dtype)


def frozen_on_meta(
    build: Callable[[AutoencoderSection], nn.Module], config: AutoencoderSection, dtype: torch.dtype
) -> nn.Module:
    """Return the module of a section on the meta device, frozen."""
    with torch.device("meta"):
        model = build(config)
        for part in model.children():  # diffusers warns where the whole is cast
            part.to(dtype)
    return model.requires_grad_(False).eval()
