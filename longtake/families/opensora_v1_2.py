"""Open-Sora 1.2, and the Lambda recipe: STDiT3, rectified flow to 1000 (before it PixArt's noise), T5, masks of given
frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from longtake.data.rules import SampleRules
from longtake.diffusion.config import Flow1000Config, NoisePredictionConfig
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.families.opensora_v1_2_kinds import KIND_PATTERN, KINDS
from longtake.families.record import Family, Text
from longtake.families.tiny import TINY_CELL, TINY_LENGTH, TINY_WORDS, tiny_sections
from longtake.models.stdit3_config import STDiT3Config

OWN_AUTOENCODER = OpenSoraVAEConfig  # which is known as a kind of `ae` from here on
RAW_CAPTIONS, FLOAT_PIXELS = "raw_captions", "float32_pixels"
QUIRKS = MappingProxyType(
    {
        RAW_CAPTIONS: "captions are trained on as they stand, and prompts are cleaned",
        FLOAT_PIXELS: "frames are scaled in float32 without antialiasing, stills by Pillow, and cut a pixel apart",
        "ema_without_ramp": "the averaged weights decay at the full rate from step 1 on",
        "reference_rate": "reference videos are taken frame by frame, whatever their rate",
    }
)
STILL_FPS = 120  # what stills are told as their rate
SCORES = ("aes", "flow", "camera_motion")  # names in `caption_facts`; captions of clips have theirs in the text
_TEXT = "longtake.families.opensora_v1_2_text"


def rules(config: Any) -> SampleRules:
    """How clips become samples: cleaned captions, and frames that follow each other."""
    return SampleRules(
        caption=f"{_TEXT}:{'raw_caption' if RAW_CAPTIONS in config.quirks else 'caption'}",
        pixels="float32" if FLOAT_PIXELS in config.quirks else "bytes",
        prompt_facts=dict.fromkeys(SCORES, ""),
        still_fps=STILL_FPS,
    )


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """What shrinks the sections of a run. Latent frames are frames, so that any length fits."""
    _, patch, _ = model.get("patch_size", (1, 2, 2))
    side = TINY_CELL // patch
    sizes: dict[str, Any] = {
        "in_channels": 3 * side**2,
        "hidden_size": 128,
        "depth": 2,
        "num_heads": 8,  # for up to 8 peers
        "caption_channels": TINY_WORDS,
        "model_max_length": TINY_LENGTH,
        "input_sq_size": 64,
    }
    return tiny_sections(model, sizes, side)


OPENSORA_V1_2 = Family(
    name="opensora_v1_2",
    model=STDiT3Config,
    objectives=(Flow1000Config, NoisePredictionConfig),
    texts=(Text("t5", "text", masked=True, empty="y_embedder.y_embedding"),),
    weights="longtake.weights.stdit3:FORMAT",
    training_folders="longtake.weights.stdit3:training_folder",
    known="longtake.families.opensora_v1_2_known:FrameMasks",
    kinds=KINDS,
    kind_pattern=KIND_PATTERN,
    language=f"{_TEXT}:read_prompt",
    readers=lambda model: frozenset({"input", "x_mask", "loss"}),
    quirks=QUIRKS,
    rules=rules,
    bucket_law=lambda quirks: "opensora_v1_2",
    sampling={"num_steps": 30, "guidance": 7.0, "aspect_ratio": "9:16"},  # height to width
    tiny=tiny,
)
