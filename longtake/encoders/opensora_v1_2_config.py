"""The `ae` section of Open-Sora 1.2's autoencoder."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from longtake.contracts import LatentShape, UserError
from longtake.encoders.autoencoder_config import EncoderSection, KLSection

Channels = tuple[float, float, float, float]
_TEMPORAL, _SPATIAL, _LATENT_CHANNELS = 4, 8, 4


class OpenSoraVAEConfig(KLSection):
    """Open-Sora 1.2's autoencoder: SDXL's for each frame, then one in time, for chunks of 17 frames, which become 5
    latent frames and know nothing of each other."""

    AUTOENCODER: ClassVar[str] = "longtake.encoders.opensora_v1_2:build"
    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {"micro_batch_size", "blend_chunks"}

    type: Literal["opensora_vae_v1_2"] = Field("opensora_vae_v1_2", description="Open-Sora 1.2's autoencoder")
    from_pretrained: str = Field(
        "hpcai-tech/OpenSora-VAE-v1.2/model.safetensors",
        description="local path, or the name of weights on the Hugging Face hub: owner/name, or "
        "owner/name/file.safetensors",
    )
    micro_frame_size: int = Field(17, ge=4, description="frames of a chunk; longer than a clip: it is coded whole")
    micro_batch_size: int = Field(4, ge=1, description="frames that the spatial part codes at once")
    blend_chunks: bool = Field(
        False,
        description="frames around the border of two chunks are coded once more as a chunk of their own, and faded in",
    )
    spatial_only: bool = Field(
        False,
        description="True: a latent frame for each frame, by the spatial part alone, of these weights or SDXL's own; "
        "PixArt-Sigma's latents where spatial_scale = 0.13025",
    )
    block_out_channels: tuple[int, int, int, int] = Field(
        (128, 256, 512, 512), description="channels of the spatial part's levels"
    )
    layers_per_block: int = Field(2, ge=1, description="its residual blocks per level; the decoder has one more")
    norm_num_groups: int = Field(32, ge=1, description="its groups of the normalisation")
    spatial_scale: float = Field(0.18215, gt=0, description="what its latents are multiplied by, before time is coded")
    filters: int = Field(128, ge=1, description="channels of the temporal part's first level")
    channel_multipliers: tuple[int, int, int, int] = Field((1, 2, 2, 4), description="those of the levels, in filters")
    num_res_blocks: int = Field(4, ge=1, description="its residual blocks per level")
    num_groups: int = Field(32, ge=1, description="its groups of the normalisation")
    latent_shift: Channels = Field((-0.10, 0.34, 0.27, 0.98), description="subtracted from the latents' channels")
    latent_scale: Channels = Field((3.85, 2.32, 2.33, 3.06), description="what they are divided by then")

    @model_validator(mode="after")
    def _divides(self) -> OpenSoraVAEConfig:
        if not all(self.latent_scale):
            raise ValueError(f"ae.latent_scale = {list(self.latent_scale)}: nothing can be divided by 0; leave it out")
        return self

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents: 17 frames to 5, n at the end to ceil(n / 4); sides are cut to whole cells."""
        temporal = 1 if self.spatial_only else _TEMPORAL
        return LatentShape(
            _LATENT_CHANNELS, temporal, _SPATIAL, causal=True, chunk=self.micro_frame_size, whole_cells=True
        )

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Raise `UserError` for sides below one cell; any length can be coded."""
        if min(height, width) < _SPATIAL:
            raise UserError(
                f'ae.type = "{self.type}": {height}x{width} pixels are less than a cell of {_SPATIAL}; choose larger '
                "sides"
            )
