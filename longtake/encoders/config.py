"""Config sections of the encoders: `ae` (pixels), `t5` (token sequence) and `clip` (pooled vector).

Each is one of several sections, told apart by `type`; the names of the real ones are Open-Sora's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from longtake.config.section import Section
from longtake.encoders.autoencoder_config import (
    CACHE,
    FROM,
    AutoencoderSection,
    Dtype,
    EncoderSection,
    PixelConfig,
    Placement,
)
from longtake.encoders.wan_config import WanVAEConfig

WAN_AUTOENCODER = WanVAEConfig  # known as a kind of `ae` from here on


class WordsConfig(EncoderSection):
    """Each word has a fixed random vector: nothing is learned or downloaded."""

    type: Literal["words"] = Field("words", description="the encoder; `words` gives each word a fixed random vector")
    dim: int = Field(128, ge=8, description="width of an embedding")
    max_length: int = Field(16, ge=1, description="tokens a caption is padded or cut to")


class T5EncoderConfig(EncoderSection):
    """The encoder half of a T5 v1.1 model: a sequence of token embeddings."""

    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {"shardformer"}

    type: Literal["text_embedder"] = Field("text_embedder", description="the encoder half of a T5 v1.1 model")
    from_pretrained: str = Field("google/t5-v1_1-xxl", description=FROM)
    cache_dir: str | None = Field(None, description=CACHE)
    dim: int = Field(4096, ge=8, description="width of an embedding, as in the weights' config.json")
    max_length: int = Field(512, ge=1, description="tokens a caption is padded or cut to")
    new_tokens: tuple[str, ...] = Field(
        (), description="texts that are tokens of their own, such as scene marks, in this order behind the tokenizer's"
    )
    mask: bool = Field(
        False, description="True: padding is not attended to and becomes zeros; the released weights expect False"
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="compute dtype; float16 overflows in T5")
    placement: Literal["resident", "sharded", "offloaded"] = Field(
        "resident", description="`sharded` over the ranks of a node, `offloaded` to the host's memory, block by block"
    )
    shardformer: bool = Field(False, description="Open-Sora's word for fused T5 kernels; PyTorch's are used either way")


class UMT5EncoderConfig(EncoderSection):
    """The encoder half of a UMT5, as Wan reads it: captions are cleaned, padding is hidden and becomes zeros."""

    WHEREABOUTS: ClassVar[frozenset[str]] = EncoderSection.WHEREABOUTS | {"tokenizer"}

    type: Literal["umt5"] = Field("umt5", description="the encoder half of a UMT5, as Wan reads it")
    from_pretrained: str = Field(
        "Wan-AI/Wan2.1-T2V-1.3B/models_t5_umt5-xxl-enc-bf16.pth", description=FROM + ", also `.pth`"
    )
    tokenizer: str | None = Field(
        None,
        description="folder of the tokenizer, or its name on the hub, such as google/umt5-xxl; None: next to the "
        "weights, in `tokenizer` or `google/umt5-xxl`",
    )
    cache_dir: str | None = Field(None, description=CACHE)
    dim: int = Field(4096, ge=8, description="width of an embedding, as in the weights' config.json")
    max_length: int = Field(512, ge=1, description="tokens a caption is padded or cut to")
    mask: ClassVar[bool] = True
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="compute dtype; float16 overflows in T5")
    placement: Literal["resident", "sharded", "offloaded"] = Field(
        "resident", description="`sharded` over the ranks of a node, `offloaded` to the host's memory, block by block"
    )


class ClipEncoderConfig(EncoderSection):
    """The text half of a CLIP model: one pooled vector."""

    type: Literal["text_embedder"] = Field("text_embedder", description="the text half of a CLIP model")
    from_pretrained: str = Field("openai/clip-vit-large-patch14", description=FROM)
    cache_dir: str | None = Field(None, description=CACHE)
    dim: int = Field(768, ge=8, description="width of the vector, as in the weights' config.json")
    max_length: int = Field(77, ge=2, description="tokens a caption is padded or cut to")
    dtype: Dtype = Field("bf16", description="compute dtype; float32 on a CPU without bf16 instructions")
    placement: Placement = Field("resident", description="`offloaded`: in the host's memory between uses")


AutoencoderConfig = SerializeAsAny[AutoencoderSection]
TextEncoderConfig = Annotated[WordsConfig | T5EncoderConfig | UMT5EncoderConfig, Field(discriminator="type")]
PooledEncoderConfig = Annotated[WordsConfig | ClipEncoderConfig, Field(discriminator="type")]


class EncodersConfig(Section):
    """The encoders of a run: what a family does not use of them stays as it is."""

    ae: AutoencoderConfig = PixelConfig()
    t5: TextEncoderConfig = WordsConfig()
    clip: PooledEncoderConfig = WordsConfig()
