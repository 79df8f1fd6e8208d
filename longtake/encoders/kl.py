"""Learned autoencoders whose posterior is a normal distribution, through diffusers: HunyuanVideo's and FLUX's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.encoders.causal_layers import lighten
from longtake.encoders.config import Autoencoder2DConfig, HunyuanVAEConfig
from longtake.encoders.extras import needs_extra

_MOST_ELEMENTS = 2**31 - 1  # of one tensor in a convolution


class KLAutoencoder(nn.Module):
    """What the two have in common: `model` is diffusers' autoencoder; latents are (z - shift) * scale.

    Only the encoder is needed in training. `load_decoder`, where set, is called once, before the first decoding.
    """

    def __init__(
        self,
        config: HunyuanVAEConfig | Autoencoder2DConfig,
        model: nn.Module,
        dtype: torch.dtype,
        load_decoder: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.model, self.dtype = config, model, dtype
        self.latent = config.latent
        self.scale, self.shift = config.scale_factor, config.shift_factor
        self.load_decoder = load_decoder
        if config.compile:
            for layer in model.modules():
                if "Resnet" in type(layer).__name__:
                    layer.compile(dynamic=True)

    @property
    def is_random(self) -> bool:
        """Whether latents are drawn from the posterior."""
        return self.config.posterior == "sample"

    @property
    def encoding(self) -> dict[str, nn.Module]:
        """The parts that encode, by their names in `model`."""
        return self._parts("encoder", "quant_conv")

    @property
    def decoding(self) -> dict[str, nn.Module]:
        """The parts that decode, by their names in `model`."""
        return self._parts("decoder", "post_quant_conv")

    def _parts(self, *names: str) -> dict[str, nn.Module]:
        found = {name: getattr(self.model, name, None) for name in names}
        return {name: part for name, part in found.items() if part is not None}

    def encoding_state(self) -> dict[str, Tensor]:
        """The weights that latents depend on, by name."""
        return nn.ModuleDict(self.encoding).state_dict()

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raises `UserError` for a shape that the autoencoder cannot give back."""
        latent = self.latent
        if (num_frames - 1) % latent.temporal:
            below = (num_frames - 1) // latent.temporal * latent.temporal + 1
            raise UserError(
                f'ae.type = "{self.config.type}": {num_frames} frames are not {latent.temporal}k+1; choose {below} or '
                f"{below + latent.temporal} as the frames of a bucket or video"
            )
        if height % latent.spatial or width % latent.spatial:
            raise UserError(
                f'ae.type = "{self.config.type}": {height}x{width} pixels do not divide into cells of '
                f"{latent.spatial}; choose sides that are multiples of {latent.spatial}"
            )

    @torch.no_grad()
    def moments(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] -> "mean" and, for a posterior that is drawn from, "std": float32
        `[B, C, F, h, w]`, scaled and shifted as latents are."""
        mean, logvar = self._raw_moments(video).float().chunk(2, dim=1)
        moments = {"mean": (mean - self.shift) * self.scale}
        if self.is_random:
            moments["std"] = torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * self.scale
        return moments

    def encode(self, video: Tensor) -> Tensor:
        """The latents at the posterior's mean, float32 `[B, C, F, h, w]`."""
        return self.moments(video)["mean"]

    @torch.no_grad()
    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        """Latents `[B, C, F, h, w]` -> float32 `[B, 3, T, H, W]` in [-1, 1], of the first `num_frames` frames."""
        if self.load_decoder is not None:
            load, self.load_decoder = self.load_decoder, None
            load()
        z = (latents.float() / self.scale + self.shift).to(self.dtype)
        return self._decoded(z)[:, :, :num_frames].float().clamp(-1, 1)

    def _raw_moments(self, video: Tensor) -> Tensor:
        raise NotImplementedError

    def _decoded(self, z: Tensor) -> Tensor:
        raise NotImplementedError


class HunyuanAutoencoder(KLAutoencoder):
    """4k+1 frames -> k+1 latent frames, each of which sees no later frame.

    Samples are encoded together as far as `piece_elements` allows, large frames in overlapping tiles that are blended.
    """

    def _raw_moments(self, video: Tensor) -> Tensor:
        groups = video.split(self.samples_at_once(*video.shape[2:]))
        return torch.cat([self.model.encode(group.to(self.dtype)).latent_dist.parameters for group in groups])

    def _decoded(self, z: Tensor) -> Tensor:
        return torch.cat([self.model.decode(one, return_dict=False)[0] for one in z.split(1)])

    def samples_at_once(self, num_frames: int, height: int, width: int) -> int:
        """How many samples of `(T, H, W)` pixels are encoded together."""
        config = self.config
        if config.use_temporal_tiling:
            num_frames = min(num_frames, config.sample_tsize + 1)
        if config.use_spatial_tiling:
            height, width = min(height, config.sample_size), min(width, config.sample_size)
        most = min(config.piece_elements, _MOST_ELEMENTS)
        return max(1, most // (num_frames * height * width * config.block_out_channels[0]))


class ImageAutoencoder(KLAutoencoder):
    """Every frame by itself."""

    def _raw_moments(self, video: Tensor) -> Tensor:
        frames = video.to(self.dtype).transpose(1, 2).flatten(0, 1)
        encoded = torch.cat([self.model.encode(frame).latent_dist.parameters for frame in frames.split(1)])
        return encoded.unflatten(0, (len(video), -1)).transpose(1, 2)

    def _decoded(self, z: Tensor) -> Tensor:
        frames = z.transpose(1, 2).flatten(0, 1)
        decoded = torch.cat([self.model.decode(frame, return_dict=False)[0] for frame in frames.split(1)])
        return decoded.unflatten(0, (len(z), -1)).transpose(1, 2)


def hunyuan_module(config: HunyuanVAEConfig) -> nn.Module:
    """diffusers' autoencoder with lighter layers, on the current default device; tiles as the config says."""
    with needs_extra("ae.type", config.type):
        from diffusers import AutoencoderKLHunyuanVideo
    model = AutoencoderKLHunyuanVideo(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_out_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_num_groups,
        scaling_factor=config.scale_factor,
    )
    lighten(model, config.piece_elements)
    model.use_tiling = config.use_spatial_tiling
    model.use_framewise_encoding = model.use_framewise_decoding = config.use_temporal_tiling
    for name, size in (
        ("height", config.sample_size),
        ("width", config.sample_size),
        ("num_frames", config.sample_tsize),
    ):
        setattr(model, f"tile_sample_min_{name}", size)
        setattr(model, f"tile_sample_stride_{name}", int(size * (1 - config.tile_overlap_factor)))
    return model


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
