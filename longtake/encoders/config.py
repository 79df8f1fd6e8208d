"""Config sections of the encoders: `ae`, `t5` (token sequence) and `clip` (pooled vector)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from longtake.config import Section


class AutoencoderConfig(Section):
    """The video autoencoder. `pixel` is a lossless space-time patching: nothing is learned or downloaded."""

    type: Literal["pixel"] = Field("pixel", description="the autoencoder; `pixel` folds pixels into channels, exactly")
    temporal: int = Field(8, ge=1, description="frames in one latent frame")
    spatial: int = Field(8, ge=1, description="pixels along one side of a latent cell")
    scaling_factor: float = Field(1.0, gt=0, description="latents are multiplied by this")


class TextEncoderConfig(Section):
    """A text encoder. `words` gives each word a fixed random vector: nothing is learned or downloaded."""

    type: Literal["words"] = Field("words", description="the encoder; `words` gives each word a fixed random vector")
    dim: int = Field(128, ge=8, description="width of an embedding")
    max_length: int = Field(16, ge=1, description="tokens a caption is padded or cut to")
