"""Video autoencoders (pixels <-> latents) and text encoders (captions -> embeddings).

An `Autoencoder` maps pixels to a posterior of latents and back; a text encoder has `embed` (to token sequences or one
pooled vector each), `mask`, `dim` and `max_length`. Learned ones consist of nn.Modules, whose weights the system reads.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.encoders.autoencoder import Autoencoder, ChunkedAutoencoder, build_autoencoder
    from longtake.encoders.autoencoder_config import (
        AUTOENCODER_FILE,
        Autoencoder2DConfig,
        AutoencoderSection,
        CogVideoXVAEConfig,
        EncoderSection,
        HunyuanVAEConfig,
        LinearConfig,
        PixelConfig,
        fitted_layer,
    )
    from longtake.encoders.cogvideox import CogVideoXAutoencoder, cogvideox_module
    from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig, UMT5EncoderConfig, WordsConfig
    from longtake.encoders.cost import EncodeCost, autoencoder_cost, seen, text_cost
    from longtake.encoders.extras import needs_extra
    from longtake.encoders.files import CheckedWeights, find_encoder, local_encoder
    from longtake.encoders.kl import HunyuanAutoencoder, ImageAutoencoder, hunyuan_module, image_module
    from longtake.encoders.linear import (
        BlockStatistics,
        LinearAutoencoder,
        principal_components,
        psnr_of_round_trip,
        split_blocks,
    )
    from longtake.encoders.opensora_v1_2 import OpenSoraAutoencoder
    from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
    from longtake.encoders.pixel import PixelAutoencoder
    from longtake.encoders.text import (
        CLIP_L,
        T5_XXL,
        ClipEncoder,
        LearnedTextEncoder,
        T5Encoder,
        TextEncoder,
        UMT5Encoder,
        build_text_encoder,
        clip_module,
        open_tokens,
        t5_module,
        umt5_module,
    )
    from longtake.encoders.tokens import CaptionTokens, Overflow
    from longtake.encoders.wan import WanAutoencoder, wan_module
    from longtake.encoders.wan_config import WanVAEConfig
    from longtake.encoders.word_vectors import WordEncoder, WordTokens

__getattr__ = lazy_exports(__name__)
