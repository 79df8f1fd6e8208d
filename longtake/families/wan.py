"""Wan 2.1 and 2.2: text-to-video, TI2V and I2V-A14B, whose first frame may be given; rectified flow, UMT5."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from longtake.data.rules import SampleRules
from longtake.diffusion.config import END_KINDS, ShiftedFlowConfig
from longtake.families.record import Family, Text
from longtake.families.tiny import TINY_CELL, TINY_LENGTH, TINY_WORDS, tiny_sections
from longtake.families.wan_folders import root
from longtake.models.wan_config import MASK_CHANNELS, WanConfig

KINDS = MappingProxyType({kind: END_KINDS[kind] for kind in ("t2v", "i2v_head")})


def refuses(model: WanConfig) -> str | None:
    """Return why runs of models that read CLIP tokens, I2V and FLF2V of Wan 2.1, are not supported."""
    if model.image_dim is None:
        return None
    return (
        f"model.image_dim = {model.image_dim}: runs of Wan 2.1's image-to-video models, which read CLIP tokens, are "
        "not supported, expected None; choose I2V-A14B or TI2V-5B of Wan 2.2 for a given first frame"
    )


def readers(model: WanConfig) -> frozenset[str]:
    """Return the readers of given frames: none for I2V, whose denoiser makes every frame and sees them in channels."""
    return frozenset() if model.visual_channels else frozenset({"input", "x_mask", "loss"})


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that shrink a run. Latent frames are frames, so that any length fits."""
    side = TINY_CELL // 2
    channels = 3 * side**2
    is_i2v = model.get("in_channels", 0) > model.get("out_channels", WanConfig.model_fields["out_channels"].default)
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_attention_heads": 8,  # for up to 8 ranks
        "attention_head_dim": 16,
        "ffn_dim": 256,
        "in_channels": 2 * channels + MASK_CHANNELS if is_i2v else channels,
        "out_channels": channels,
        "text_dim": TINY_WORDS,
        "text_len": TINY_LENGTH,
        "freq_dim": 64,
    }
    return tiny_sections(model, sizes, side)


WAN = Family(
    name="wan",
    model=WanConfig,
    objectives=(ShiftedFlowConfig,),
    texts=(Text("t5", "text"),),
    weights="longtake.weights.wan:FORMAT",
    known="longtake.families.wan_known:law",
    kinds=KINDS,
    refuses=refuses,
    readers=readers,
    reference_crop=0.05,  # the authors take the size from the image
    rules=lambda config: SampleRules(caption="plain"),
    sampling={"solver": "unipc", "num_steps": 50, "guidance": 5.0, "aspect_ratio": "16:9"},
    tiny=tiny,
    root=root,
)
