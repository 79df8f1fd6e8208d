"""CogVideoX and CogVideoX-Fun: one sequence of text and video, v-prediction, T5, given frames or a control video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtake.data.rules import Companion, SampleRules
from longtake.diffusion.config import END_KINDS, VPredictionConfig
from longtake.families.record import Family, Text
from longtake.models.cogvideox_config import CogVideoXConfig

TINY_CELL = 16  # pixels along one side of a token
TINY_WORDS, TINY_LENGTH = 64, 16


def companions(model: CogVideoXConfig) -> tuple[Companion, ...]:
    """A control model's clips bring a control video."""
    return (Companion("control", "control", "video", "control"),) if model.visual == "control" else ()


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """What shrinks the sections of a run. Latent frames are frames, and patches have one, so that any length fits."""
    patch = model.get("patch_size", 2)
    side = TINY_CELL // patch
    sizes: dict[str, Any] = {
        "from_pretrained": None,
        "num_layers": 2,
        "num_attention_heads": 8,  # for up to 8 peers
        "attention_head_dim": 16,
        "out_channels": 3 * side**2,
        "text_embed_dim": TINY_WORDS,
        "max_text_seq_length": TINY_LENGTH,
        "time_embed_dim": 32,
        "patch_size": patch,
        "patch_size_t": None,
        "sample_height": 2 * patch,
        "sample_width": 2 * patch,
        "sample_frames": 17,
        "temporal_compression_ratio": 1,
    }
    if model.get("ofs_embed_dim"):
        sizes["ofs_embed_dim"] = sizes["time_embed_dim"]
    if model.get("grad_ckpt_buffer_size"):
        sizes["grad_ckpt_buffer_size"] = 2**20
    return {
        "model": sizes,
        "ae": {"type": "pixel", "temporal": 1, "spatial": side},
        "t5": {"type": "words", "dim": TINY_WORDS, "max_length": TINY_LENGTH},
    }


COGVIDEOX = Family(
    name="cogvideox",
    model=CogVideoXConfig,
    objectives=(VPredictionConfig,),
    texts=(Text("t5", "text"),),
    weights="longtake.weights.cogvideox:FORMAT",
    known="longtake.families.cogvideox_known:GivenFrames",
    kinds=END_KINDS,
    guidance={"dynamic": "longtake.diffusion.guidance:dynamic"},
    rules=lambda config: SampleRules(caption="plain"),
    bucket_law=lambda quirks: "cogvideox_fun",
    companions=companions,
    sampling={"solver": "ddim", "guidance": 6.0, "aspect_ratio": "0.57"},
    tiny=tiny,
)
