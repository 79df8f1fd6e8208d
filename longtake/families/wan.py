"""Wan 2.1 and 2.2: text-to-video, and TI2V, whose first frame may be given; rectified flow, UMT5."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from longtake.data.rules import SampleRules
from longtake.diffusion.config import END_KINDS, ShiftedFlowConfig
from longtake.families.record import Family, Text
from longtake.families.tiny import TINY_CELL, TINY_LENGTH, TINY_WORDS, tiny_sections
from longtake.families.wan_folders import root
from longtake.models.wan_config import WanConfig

KINDS = MappingProxyType({kind: END_KINDS[kind] for kind in ("t2v", "i2v_head")})


def refuses(model: WanConfig) -> str | None:
    """Image-to-video models that read given frames in channels of their own are not trained yet."""
    if not model.visual_channels and model.image_dim is None:
        return None
    return (
        f"model.in_channels = {model.in_channels}: runs of Wan's image-to-video models (I2V) are not supported, "
        f"expected in_channels = {model.out_channels}; choose weights of T2V, or of TI2V for a given first frame"
    )


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that shrink a run. Latent frames are frames, so that any length fits."""
    side = TINY_CELL // 2
    channels = 3 * side**2
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_attention_heads": 8,  # for up to 8 ranks
        "attention_head_dim": 16,
        "ffn_dim": 256,
        "in_channels": channels,
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
    known="longtake.families.wan_known:FirstFrame",
    kinds=KINDS,
    refuses=refuses,
    readers=frozenset({"input", "x_mask", "loss"}),
    rules=lambda config: SampleRules(caption="plain"),
    sampling={"solver": "unipc", "num_steps": 50, "guidance": 5.0, "aspect_ratio": "16:9"},
    tiny=tiny,
    root=root,
)
