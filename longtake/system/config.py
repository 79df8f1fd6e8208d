"""The part of a run's config that says what the model is; training and generation build on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from longtake.config import Section
from longtake.diffusion import FlowConfig
from longtake.encoders import AutoencoderConfig, TextEncoderConfig
from longtake.models import MMDiTConfig
from longtake.parallel import ParallelConfig


class SamplingOption(Section):
    """How videos are sampled where nothing else is said."""

    resolution: str = Field("256px", description="a name as in bucket_config")
    aspect_ratio: str = Field("16:9", description="width to height")
    num_frames: int = Field(129, ge=1, description="1 makes a still")
    num_steps: int = Field(50, ge=1, description="solver steps")
    guidance: float = Field(7.5, ge=0, description="classifier-free guidance scale; 1: the prompt alone")
    shift: bool = Field(True, description="time grid shifted as in training; False: even steps")
    flow_shift: float | None = Field(None, gt=0, description="a fixed shift of the time grid instead")
    seed: int | None = Field(None, ge=0, description="seed of the first video; None: the run's seed")


class SystemConfig(Section):
    """What the model is made of, where it runs, and how it is sampled by default."""

    model: MMDiTConfig = MMDiTConfig()
    ae: AutoencoderConfig = AutoencoderConfig()
    t5: TextEncoderConfig = TextEncoderConfig()
    clip: TextEncoderConfig = TextEncoderConfig()
    objective: FlowConfig = FlowConfig()
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="compute dtype; float32 where the device has no bf16")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="`auto` takes CUDA where there is one")
    guidance: float = Field(4.0, description="guidance scale told to a model with model.guidance_embed")
    cpu_threads: int | None = Field(
        None, ge=1, description="threads of each process that computes on a CPU; None: PyTorch's choice"
    )
    deterministic: bool = Field(False, description="only deterministic CUDA kernels, at some cost in speed")
    seed: int = Field(1024, ge=0, description="decides initial weights, data order and every random choice")
    compat: Literal["opensora_v2"] | None = Field(None, description="reproduce another system's behaviour, quirks too")
    sampling_option: SamplingOption = SamplingOption()
    fps_save: float = Field(24.0, gt=0, description="frame rate of written videos, and of their caption suffix")
    motion_score: float | None = Field(None, description="motion score in the caption suffix of generated videos")
    ae_spatial_compression: int | None = Field(
        None, ge=1, description="sides of a bucket are multiples of this; default: ae.spatial x model.patch_size"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> SystemConfig:
        channels = 3 * self.ae.temporal * self.ae.spatial**2
        packed = channels * self.model.patch_size**2
        if self.model.in_channels != packed:
            raise ValueError(
                f"model.in_channels = {self.model.in_channels}: the autoencoder's {channels} latent channels in "
                f"patches of {self.model.patch_size}x{self.model.patch_size} make {packed}; "
                f"write model.in_channels = {packed}"
            )
        for name, encoder, width in (
            ("t5", self.t5, self.model.context_in_dim),
            ("clip", self.clip, self.model.vec_in_dim),
        ):
            if encoder.dim != width:
                key = "context_in_dim" if name == "t5" else "vec_in_dim"
                raise ValueError(f"{name}.dim = {encoder.dim}: model.{key} is {width}; the two must be equal")
        return self

    @property
    def size_divisor(self) -> int:
        """Height and width of every bucket are multiples of this many pixels."""
        return self.ae_spatial_compression or self.ae.spatial * self.model.patch_size
