"""Video autoencoders (pixels <-> latents) and text encoders (captions -> embeddings).

An autoencoder has `latent`, `is_random`, `check`, `moments`, `encode` and `decode`; an encoder of tokens `embed_tokens`
and one of vectors `embed_pooled`, both `dim` and `max_length`. Learned ones are nn.Modules, whose weights the system
reads and places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longtake.encoders.config import (
    Autoencoder2DConfig,
    AutoencoderConfig,
    ClipEncoderConfig,
    EncoderSection,
    HunyuanVAEConfig,
    PixelConfig,
    PooledEncoderConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    WordsConfig,
)
from longtake.encoders.cost import EncodeCost, autoencoder_cost, text_cost
from longtake.encoders.find import find_encoder
from longtake.encoders.kl import (
    HunyuanAutoencoder,
    ImageAutoencoder,
    KLAutoencoder,
    check_kl_shape,
    hunyuan_module,
    image_module,
)
from longtake.encoders.names import CheckedWeights, Renamed
from longtake.encoders.pixel import PixelAutoencoder
from longtake.encoders.text import (
    CLIP_L,
    T5_XXL,
    ClipEncoder,
    ClipNames,
    T5Encoder,
    T5Names,
    clip_module,
    fill_positions,
    read_architecture,
    t5_module,
)
from longtake.encoders.words import WordEncoder

Autoencoder = PixelAutoencoder | KLAutoencoder
TextEncoder = WordEncoder | T5Encoder
PooledEncoder = WordEncoder | ClipEncoder

__all__ = [
    "CLIP_L",
    "T5_XXL",
    "Autoencoder",
    "Autoencoder2DConfig",
    "AutoencoderConfig",
    "CheckedWeights",
    "ClipEncoder",
    "ClipEncoderConfig",
    "ClipNames",
    "EncodeCost",
    "EncoderSection",
    "HunyuanAutoencoder",
    "HunyuanVAEConfig",
    "ImageAutoencoder",
    "KLAutoencoder",
    "PixelAutoencoder",
    "PixelConfig",
    "PooledEncoder",
    "PooledEncoderConfig",
    "Renamed",
    "T5Encoder",
    "T5EncoderConfig",
    "T5Names",
    "TextEncoder",
    "TextEncoderConfig",
    "WordEncoder",
    "WordsConfig",
    "autoencoder_cost",
    "build_autoencoder",
    "build_text_encoder",
    "check_shape",
    "clip_module",
    "fill_positions",
    "find_encoder",
    "hunyuan_module",
    "image_module",
    "t5_module",
    "text_cost",
    "text_facts",
]


def build_autoencoder(config: AutoencoderConfig, dtype: torch.dtype = torch.float32) -> Autoencoder:
    """The autoencoder that `ae` describes; a learned one on the meta device, of `dtype`, to be filled with weights."""
    if isinstance(config, PixelConfig):
        return PixelAutoencoder(config.temporal, config.spatial, config.scaling_factor)
    hunyuan = isinstance(config, HunyuanVAEConfig)
    with torch.device("meta"):
        model = (hunyuan_module if hunyuan else image_module)(config)
        for part in model.children():  # diffusers warns where the whole is cast
            part.to(dtype)
    return (HunyuanAutoencoder if hunyuan else ImageAutoencoder)(config, model.requires_grad_(False).eval(), dtype)


def check_shape(config: AutoencoderConfig, num_frames: int, height: int, width: int) -> None:
    """Raises `UserError` for pixels that the autoencoder of `ae` cannot give back; nothing is built for it."""
    if isinstance(config, PixelConfig):
        PixelAutoencoder(config.temporal, config.spatial).check(num_frames, height, width)
    else:
        check_kl_shape(config, num_frames, height, width)


def build_text_encoder(
    config: TextEncoderConfig | PooledEncoderConfig,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tokenizer: bool = True,
) -> WordEncoder | T5Encoder | ClipEncoder:
    """The text encoder that `t5` or `clip` describes; a learned one on the meta device, of `dtype`, to be filled.

    `folder` has its `config.json` and, unless `tokenizer` is False, its tokenizer; without a folder the published sizes
    are taken, for what needs no more than these. `device` is where it will compute. Raises `UserError` for a folder
    that does not have them.
    """
    if isinstance(config, WordsConfig):
        return WordEncoder(config.dim, config.max_length)
    device, is_t5 = torch.device(device), isinstance(config, T5EncoderConfig)
    facts = text_facts(config, folder)
    with torch.device("meta"):
        module = (t5_module if is_t5 else clip_module)(facts).to(dtype).requires_grad_(False)
    return (T5Encoder if is_t5 else ClipEncoder)(config, module.eval(), folder if tokenizer else None, device)


def text_facts(config: T5EncoderConfig | ClipEncoderConfig, folder: Path | None) -> dict[str, Any]:
    """The `config.json` of a text encoder's folder; without one the published sizes, at the width of the config."""
    is_t5 = isinstance(config, T5EncoderConfig)
    if folder is not None:
        return read_architecture(folder, config, "t5" if is_t5 else "clip")
    return {**T5_XXL, "d_model": config.dim} if is_t5 else {**CLIP_L, "hidden_size": config.dim}
