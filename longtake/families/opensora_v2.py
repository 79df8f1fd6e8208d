"""Open-Sora 2.0, and FLUX, whose layout it shares: MMDiT, rectified flow, T5 and CLIP, known frames at the ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from longtake.data.rules import SampleRules
from longtake.diffusion.config import END_KINDS, FlowConfig
from longtake.families.record import Family, Text
from longtake.families.tiny import TINY_CELL, TINY_WORDS, tiny_sections
from longtake.models.config import MMDiTConfig

QUIRKS = MappingProxyType(
    {
        "float32_pixels": "frames are scaled in float32 without antialiasing, stills by Pillow, and cut a pixel apart",
        "spread_windows": "frames are spread evenly over the window, fractions cut off; the last window is never taken",
        "published_captions": "rate and motion score in two forms, one for training and one for inference",
        "ratio_by_name": "the nearest aspect ratio by its name, and stills have a frame rate",
        "shift_of_patch_2": "training times are shifted as for patches of 2 x 2, whatever the patch is",
        "ema_without_ramp": "the averaged weights decay at the full rate from step 1 on",
        "loss_at_ends": "`no_i2v_ref_loss` leaves out the first and last frame, none where inner frames are known",
        "reference_rate": "reference videos are taken frame by frame, whatever their rate",
    }
)


def rules(config: Any) -> SampleRules:
    """How clips become samples: captions with a rate; under quirks as the published program has it."""
    quirks = config.quirks
    return SampleRules(
        caption="rate_as_published" if "published_captions" in quirks else "rate",
        window="spread" if "spread_windows" in quirks else "even",
        pixels="float32" if "float32_pixels" in quirks else "bytes",
    )


def tiny(model: Mapping[str, Any]) -> dict[str, Any]:
    """What shrinks the sections of a run; a token has `TINY_CELL` pixels a side, however cells and patches share."""
    patch = model.get("patch_size", 2)
    sizes: dict[str, Any] = {
        "in_channels": 3 * TINY_CELL**2,
        "patch_size": patch,
        "vec_in_dim": TINY_WORDS,
        "context_in_dim": TINY_WORDS,
        "hidden_size": 128,
        "num_heads": 8,  # for up to 8 peers
        "mlp_ratio": 4.0,
        "depth": 1,
        "depth_single_blocks": 2,
        "axes_dim": (4, 6, 6),
    }
    return tiny_sections(model, sizes, TINY_CELL // patch, texts=("t5", "clip"))


OPENSORA_V2 = Family(
    name="opensora_v2",
    model=MMDiTConfig,
    objectives=(FlowConfig,),
    texts=(Text("t5", "text"), Text("clip", "vector", pooled=True)),
    weights="longtake.weights.mmdit:FORMAT",
    known="longtake.diffusion.windows:EndWindows",
    kinds=END_KINDS,
    guided_by_known=True,
    quirks=QUIRKS,
    rules=rules,
    bucket_law=lambda quirks: "opensora_v2" if "ratio_by_name" in quirks else None,
    tiny=tiny,
)
