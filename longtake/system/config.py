"""The part of a run's config that says what the model is; training and generation build on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from longtake.config import Section
from longtake.diffusion import FlowConfig, SolverName
from longtake.encoders import AutoencoderConfig, PixelConfig, PooledEncoderConfig, TextEncoderConfig, WordsConfig
from longtake.models import LoraConfig, MMDiTConfig
from longtake.parallel import ParallelConfig


class SamplingDefaults(Section):
    """How videos of a run are sampled where nothing else is said. A size left open is that of its buckets."""

    resolution: str | None = Field(
        None, description="a name as in bucket_config; None: the largest there that has clips of several frames"
    )
    aspect_ratio: str | None = Field(
        None, description="width to height; None: 16:9, or the one that bucket_config keeps (`256px_ar1:1`)"
    )
    num_frames: int | None = Field(
        None, ge=1, description="1 makes a still; None: the longest length of that resolution in bucket_config"
    )
    num_steps: int = Field(50, ge=1, description="solver steps")
    guidance: float = Field(7.5, ge=0, description="classifier-free guidance scale; 1: the prompt alone")
    guidance_img: float = Field(3.0, ge=0, description="guidance scale of known frames; where none are known, unused")
    text_osci: bool = Field(False, description="after 10 steps, text guidance at every second step only")
    image_osci: bool = Field(False, description="the same for guidance by known frames")
    scale_temporal_osci: bool = Field(
        False, description="for i2v: guidance by known frames grows over the frames and fades over the steps"
    )
    method: Literal["i2v", "distill"] = Field(
        "i2v", description="`i2v`: guided by branches; `distill`: the scale is told to a model with guidance_embed"
    )
    guidance_batch: Literal["auto"] | bool = Field(
        "auto", description="True: branches of guidance as one batch, False: in turn; `auto`: as the memory allows"
    )
    solver: SolverName = Field("euler", description="`euler`, or `ab2` (second order at the same cost: fewer steps)")
    shift: bool = Field(True, description="time grid shifted as in training; False: even steps")
    flow_shift: float | None = Field(None, gt=0, description="a fixed shift of the time grid instead")
    seed: int | None = Field(None, ge=0, description="seed of the first video; None: the run's seed")


class SamplingOption(SamplingDefaults):
    """How videos are sampled, their size decided."""

    resolution: str = Field("256px", description="a name as in bucket_config")
    aspect_ratio: str = Field("16:9", description="width to height")
    num_frames: int = Field(129, ge=1, description="1 makes a still")


class SystemConfig(Section):
    """What the model is made of, where it runs, and how it is sampled by default."""

    model: MMDiTConfig = MMDiTConfig()
    lora: LoraConfig | None = Field(None, description="train adapters in place of the denoiser's own weights")
    freeze: tuple[str, ...] = Field(
        (), description="parameters or modules of the denoiser that do not train, by name, `*` for anything"
    )
    train_only: tuple[str, ...] | None = Field(
        None, description="parameters or modules of the denoiser that train, by name; all else does not"
    )
    ae: AutoencoderConfig = PixelConfig()
    t5: TextEncoderConfig = WordsConfig()
    clip: PooledEncoderConfig = WordsConfig()
    objective: FlowConfig = FlowConfig()
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="compute dtype; float32 where the device has no bf16")
    master_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype that trained weights are kept in; `bf16` rounds their updates stochastically"
    )
    compile: bool = Field(False, description="compile the denoiser's blocks: faster steps, a first step of minutes")
    compile_dynamic: bool = Field(
        True, description="one graph for all buckets; False: a graph for each shape of a micro-batch"
    )
    compile_limit: int = Field(16, ge=1, description="graphs of one kind of block; further shapes run uncompiled")
    compile_cache: str | None = Field(
        None, description="folder of your own in which compiled code waits for the next launch; None: PyTorch's choice"
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="`auto` takes CUDA where there is one")
    guidance: float = Field(4.0, description="guidance scale told to a model with model.guidance_embed")
    cpu_threads: int | None = Field(
        None, ge=1, description="threads of each process that computes on a CPU; None: PyTorch's choice"
    )
    deterministic: bool = Field(False, description="only deterministic CUDA kernels, at some cost in speed")
    seed: int = Field(1024, ge=0, description="decides initial weights, data order and every random choice")
    compat: Literal["opensora_v2"] | None = Field(None, description="reproduce another system's behaviour, quirks too")
    sampling_option: SamplingDefaults = SamplingDefaults()
    fps_save: float = Field(24.0, gt=0, description="frame rate of written videos, and of their caption suffix")
    motion_score: float | None = Field(None, description="motion score in the caption suffix of generated videos")
    ae_spatial_compression: int | None = Field(
        None, ge=1, description="sides of a bucket are multiples of this; default: ae's latent cell x model.patch_size"
    )

    @field_validator("motion_score", mode="before")
    @classmethod
    def _motion_is_a_number(cls, score: Any) -> Any:
        if isinstance(score, str) and score.strip().lower() == "dynamic":
            raise ValueError("asks a paid service for a number; give one yourself, from 1 (still) to 7 (lively)")
        return score

    @model_validator(mode="after")
    def _adapters_alone_train(self) -> SystemConfig:
        if self.lora is not None and (self.freeze or self.train_only is not None):
            key = "freeze" if self.freeze else "train_only"
            raise ValueError(f"{key}: with lora the adapters alone train; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> SystemConfig:
        channels = self.ae.latent.channels
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
        return self.ae_spatial_compression or self.ae.latent.spatial * self.model.patch_size
