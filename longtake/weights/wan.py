"""Wan's files: the authors' names, which ComfyUI, VideoX-Fun, musubi-tuner, diffusion-pipe and DiffSynth keep, and
those of diffusers' WanTransformer3DModel.

official   ours, but for the name of the list of blocks; ComfyUI's files may have a prefix
own        ours
diffusers  other names for all but the patch embedding; shapes are the same, nothing is fused
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longtake.models.wan import Wan
from longtake.models.wan_config import official_config, published_config
from longtake.weights.format import Format, Naming, Shape, WeightLayout
from longtake.weights.lora import DIFFUSERS_STYLE, KOHYA, PEFT

BLOCK, OURS = "blocks.*", "transformer_blocks.*"
_CONDITIONS = "condition_embedder"
_ATTENTION = {
    **{f"to_{layer}": layer for layer in "qkv"},
    "to_out.0": "o",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
}
_IMAGE_ATTENTION = {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "norm_k_img"}
DIFFUSERS_LAYERS = {  # of diffusers -> ours
    f"{_CONDITIONS}.text_embedder.linear_1": "text_embedding.0",
    f"{_CONDITIONS}.text_embedder.linear_2": "text_embedding.2",
    f"{_CONDITIONS}.time_embedder.linear_1": "time_embedding.0",
    f"{_CONDITIONS}.time_embedder.linear_2": "time_embedding.2",
    f"{_CONDITIONS}.time_proj": "time_projection.1",
    f"{_CONDITIONS}.image_embedder.norm1": "img_emb.proj.0",
    f"{_CONDITIONS}.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    f"{_CONDITIONS}.image_embedder.ff.net.2": "img_emb.proj.3",
    f"{_CONDITIONS}.image_embedder.norm2": "img_emb.proj.4",
    f"{_CONDITIONS}.image_embedder.pos_embed": "img_emb.emb_pos",
    **{f"{BLOCK}.attn1.{theirs}": f"{OURS}.self_attn.{ours}" for theirs, ours in _ATTENTION.items()},
    **{
        f"{BLOCK}.attn2.{theirs}": f"{OURS}.cross_attn.{ours}"
        for theirs, ours in (_ATTENTION | _IMAGE_ATTENTION).items()
    },
    f"{BLOCK}.norm2": f"{OURS}.norm3",  # the only norm of a block with weights
    f"{BLOCK}.ffn.net.0.proj": f"{OURS}.ffn.0",
    f"{BLOCK}.ffn.net.2": f"{OURS}.ffn.2",
    f"{BLOCK}.scale_shift_table": f"{OURS}.modulation",
    "proj_out": "head.head",
    "scale_shift_table": "head.modulation",
}


def sizes_in(parts: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of the model section that the tensors of a file show, by our names."""
    sizes: dict[str, Any] = {"num_layers": sum(part.endswith(".modulation") for part in parts) - 1}
    shown = {
        "hidden_size": ("head.modulation", -1),
        "in_channels": ("patch_embedding.weight", 1),
        "text_dim": ("text_embedding.0.weight", 1),
        "freq_dim": ("time_embedding.0.weight", 1),
        "ffn_dim": (f"{OURS[:-1]}0.ffn.0.weight", 0),
        "image_dim": ("img_emb.proj.0.weight", 0),
        "pos_embed_seq_len": ("img_emb.emb_pos", 1),
    }
    for key, (part, dim) in shown.items():
        if part in parts:
            sizes[key] = parts[part][dim]
        elif part.startswith("img_emb."):
            sizes[key] = None
    if {"head.head.weight", "patch_embedding.weight"} <= parts.keys():
        sizes["out_channels"] = parts["head.head.weight"][0] // math.prod(parts["patch_embedding.weight"][2:])
    return sizes


FORMAT = Format(
    name="Wan",
    sources="a folder or file of Wan 2.1 or 2.2, of diffusers' Wan, or a ComfyUI file",
    namings={
        "diffusers": Naming(
            DIFFUSERS_LAYERS, signs=("patch_embedding.weight", f"{_CONDITIONS}.time_embedder.linear_1.weight")
        ),
        "official": Naming(
            {BLOCK: OURS},
            signs=("patch_embedding.weight", "time_embedding.0.weight", "blocks.*.modulation"),
            prefixes=("model.diffusion_model.",),
        ),
        "own": Naming({}, signs=("patch_embedding.weight", f"{OURS}.modulation")),
    },
    own=lambda config: WeightLayout("own"),
    keys="model.num_layers or image_dim",
    sizes_in=sizes_in,
    inner=("high_noise_model",),
    folders={"diffusers": published_config, "official": official_config},
    lora_targets=tuple(Wan.tensor_plan),
    lora_styles={
        "peft": replace(PEFT, names="diffusers"),
        "diffusers": replace(DIFFUSERS_STYLE, names="diffusers"),
        "comfy": replace(KOHYA, prefix="diffusion_model.", flat=False, names="official"),
        "kohya": replace(KOHYA, names="official"),
    },
    reference="longtake.weights.references:wan",
)
DIFFUSERS, OFFICIAL = FORMAT.as_published("diffusers"), FORMAT.as_published("official")
