"""Weight files: safetensors read when asked for, and one file for each model family that maps its names to ours."""

from __future__ import annotations

from longtake.weights.files import TensorSource, WeightFiles, save_weights
from longtake.weights.lora import (
    Adapter,
    Adapters,
    Family,
    adapters_of,
    convert_adapters,
    find_adapters,
    merged,
    read_adapters,
    save_adapters,
    tensors_of,
)
from longtake.weights.mmdit import MMDiTWeights, find_denoiser, load_mmdit, save_mmdit, to_open_sora
from longtake.weights.mmdit_names import DIFFUSERS, FLUX, OPEN_SORA_V2, ROPE_KEY, Layout, layout_of, state_shapes

__all__ = [
    "DIFFUSERS",
    "FLUX",
    "OPEN_SORA_V2",
    "ROPE_KEY",
    "Adapter",
    "Adapters",
    "Family",
    "Layout",
    "MMDiTWeights",
    "TensorSource",
    "WeightFiles",
    "adapters_of",
    "convert_adapters",
    "find_adapters",
    "find_denoiser",
    "layout_of",
    "load_mmdit",
    "merged",
    "read_adapters",
    "save_adapters",
    "save_mmdit",
    "save_weights",
    "state_shapes",
    "tensors_of",
    "to_open_sora",
]
