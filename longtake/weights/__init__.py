"""Weight files: safetensors read when asked for, and one file for each model family that maps its names to ours."""

from __future__ import annotations

from longtake.weights.files import WeightFiles, save_weights
from longtake.weights.mmdit import (
    FLUX,
    OPEN_SORA_V2,
    ROPE_KEY,
    Layout,
    MMDiTWeights,
    layout_of,
    load_mmdit,
    save_mmdit,
    to_open_sora,
)

__all__ = [
    "FLUX",
    "OPEN_SORA_V2",
    "ROPE_KEY",
    "Layout",
    "MMDiTWeights",
    "WeightFiles",
    "layout_of",
    "load_mmdit",
    "save_mmdit",
    "save_weights",
    "to_open_sora",
]
