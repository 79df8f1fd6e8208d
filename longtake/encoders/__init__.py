"""Video autoencoders (pixels <-> latents) and text encoders (captions -> embeddings), built from their config."""

from longtake.encoders.config import AutoencoderConfig, TextEncoderConfig
from longtake.encoders.pixel import PixelAutoencoder
from longtake.encoders.words import WordEncoder

__all__ = [
    "AutoencoderConfig",
    "PixelAutoencoder",
    "TextEncoderConfig",
    "WordEncoder",
    "build_autoencoder",
    "build_text_encoder",
]


def build_autoencoder(config: AutoencoderConfig) -> PixelAutoencoder:
    """The autoencoder that `ae.type` names."""
    return PixelAutoencoder(config.temporal, config.spatial, config.scaling_factor)


def build_text_encoder(config: TextEncoderConfig) -> WordEncoder:
    """The text encoder that `t5.type` or `clip.type` names."""
    return WordEncoder(config.dim, config.max_length)
