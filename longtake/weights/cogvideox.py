"""CogVideoX's files: diffusers' CogVideoXTransformer3DModel, which CogVideoX-Fun keeps too, and those of SAT.

own        diffusers' names but for embedders and MLPs; the patch embedding is a linear layer; learned positions of
           text and video apart
diffusers  CogVideoX 1.0 has a convolution for patch embedding
sat        the authors' own: q, k and v joined, both modulations of a block joined
sat_lora   their adapters, of the same layers
comfy      ComfyUI's own CogVideoX, for adapters
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longtake.models.cogvideox import CogVideoX
from longtake.models.cogvideox_config import published_config
from longtake.weights.format import Form, Format, Growth, Naming, WeightLayout
from longtake.weights.lora import DIFFUSERS_STYLE, KOHYA, PEFT

BLOCK = "transformer_blocks.*"
_POSITIONS = "text_positions.table", "video_positions.table"


def _modulation(norm: str) -> tuple[str, str]:
    return f"{BLOCK}.{norm}.linear.video", f"{BLOCK}.{norm}.linear.text"


def _patch_shape(config: Any) -> tuple[int, ...]:
    """Of the weight of the patch embedding in files: a convolution's in 1.0, a linear layer's in 1.5."""
    (frames, rows, columns), channels = config.patch, config.in_channels
    if config.patch_size_t is None:
        return config.hidden_size, channels, rows, columns
    return config.hidden_size, channels * frames * rows * columns


def _positions_shape(config: Any) -> tuple[int, ...]:
    frames, rows, columns = config.base_grid
    return 1, config.max_text_seq_length + frames * rows * columns, config.hidden_size


MODULATIONS = {f"{BLOCK}.{norm}.linear": _modulation(norm) for norm in ("norm1", "norm2")}
LAYERS = {  # of diffusers -> ours
    **{
        f"{part}_embedding.linear_{number}": f"{part}_embedding.{layer}_layer"
        for part in ("time", "ofs")
        for number, layer in ((1, "in"), (2, "out"))
    },
    **{
        f"{BLOCK}.{theirs}": f"{BLOCK}.{ours}"
        for theirs, ours in (("attn1.to_out.0", "attn1.to_out"), ("ff.net.0.proj", "ff.0"), ("ff.net.2", "ff.2"))
    },
}
SAT_LAYERS = {
    "mixins.patch_embed.proj": "patch_embed.proj",
    "mixins.patch_embed.text_proj": "patch_embed.text_proj",
    "mixins.pos_embed.pos_embedding": _POSITIONS,
    **{
        f"{part}_embed.{number}": f"{part}_embedding.{layer}_layer"
        for part in ("time", "ofs")
        for number, layer in ((0, "in"), (2, "out"))
    },
    "transformer.layers.*.input_layernorm": f"{BLOCK}.norm1.norm",
    "transformer.layers.*.post_attention_layernorm": f"{BLOCK}.norm2.norm",
    "transformer.layers.*.attention.query_key_value": tuple(f"{BLOCK}.attn1.to_{one}" for one in "qkv"),
    "transformer.layers.*.attention.dense": f"{BLOCK}.attn1.to_out",
    "transformer.layers.*.mlp.dense_h_to_4h": f"{BLOCK}.ff.0",
    "transformer.layers.*.mlp.dense_4h_to_h": f"{BLOCK}.ff.2",
    "transformer.final_layernorm": "norm_final",
    "mixins.adaln_layer.adaLN_modulations.*.1": tuple(
        _modulation(norm)[stream] for stream in (0, 1) for norm in ("norm1", "norm2")
    ),
    "mixins.adaln_layer.query_layernorm_list.*": f"{BLOCK}.attn1.norm_q",
    "mixins.adaln_layer.key_layernorm_list.*": f"{BLOCK}.attn1.norm_k",
    "mixins.final_layer.adaLN_modulation.1": "norm_out.linear",
    "mixins.final_layer.norm_final": "norm_out.norm",
    "mixins.final_layer.linear": "proj_out",
}
_SAT_ADAPTERS = {
    **{f"layers.*.attention.query_key_value.{i}": f"{BLOCK}.attn1.to_{one}" for i, one in enumerate("qkv")},
    "layers.*.attention.dense.0": f"{BLOCK}.attn1.to_out",
}

_COMFY_LAYERS = {
    **{
        f"{part}_embedding_linear_{number}": f"{part}_embedding.{layer}_layer"
        for part in ("time", "ofs")
        for number, layer in ((1, "in"), (2, "out"))
    },
    "blocks.*": BLOCK,
    **{f"blocks.*.{one}": f"{BLOCK}.attn1.to_{one}" for one in "qkv"},
    **{f"blocks.*.norm_{one}": f"{BLOCK}.attn1.norm_{one}" for one in "qk"},
    "blocks.*.attn_out": f"{BLOCK}.attn1.to_out",
    "blocks.*.ff_proj": f"{BLOCK}.ff.0",
    "blocks.*.ff_out": f"{BLOCK}.ff.2",
    **{f"blocks.*.{norm}.linear": _modulation(norm) for norm in ("norm1", "norm2")},
}


def _more_channels(weight: str) -> tuple[Growth, ...]:
    note = "fewer input channels: those that the model has beyond start at zero"
    return (Growth((weight,), note=note, dims=(1,), reads_known=True),)


FORMAT = Format(
    name="CogVideoX",
    sources="a folder of diffusers' CogVideoX or of CogVideoX-Fun",
    namings={
        "diffusers": Naming(
            LAYERS | MODULATIONS | {"patch_embed.pos_embedding": _POSITIONS},
            signs=("patch_embed.proj.weight", "time_embedding.linear_1.weight"),
            forms={"patch_embed.proj.weight": Form(_patch_shape), "patch_embed.pos_embedding": Form(_positions_shape)},
            growths=_more_channels("patch_embed.proj.weight"),
        ),
        "own": Naming(
            MODULATIONS,
            signs=("patch_embed.proj.weight", "time_embedding.in_layer.weight"),
            growths=_more_channels("patch_embed.proj.weight"),
        ),
        "sat": Naming(
            SAT_LAYERS,
            signs=("mixins.patch_embed.proj.weight",),
            prefixes=("model.diffusion_model.",),
            forms={
                "mixins.patch_embed.proj.weight": Form(_patch_shape),
                "mixins.pos_embed.pos_embedding": Form(_positions_shape),
            },
            growths=_more_channels("mixins.patch_embed.proj.weight"),
            computed=dict.fromkeys(("mixins.pos_embed.*", "*position_embeddings.weight", "*embed_tokens.weight")),
        ),
        "sat_lora": Naming(_SAT_ADAPTERS | MODULATIONS, signs=()),
        "comfy": Naming(_COMFY_LAYERS, signs=(), forms={"patch_embed.proj.weight": Form(_patch_shape)}),
    },
    own=lambda config: WeightLayout("own"),
    keys="model.num_layers, use_learned_positional_embeddings or ofs_embed_dim",
    rows={"text_positions.table": "max_text_seq_length"},
    folders={"diffusers": published_config},
    lora_targets=tuple(CogVideoX.tensor_plan),
    lora_styles={
        "peft": replace(PEFT, names="diffusers"),
        "diffusers": replace(DIFFUSERS_STYLE, names="diffusers"),
        "comfy": replace(KOHYA, names="comfy"),
        "fun": replace(KOHYA, prefix="lora_unet__", names="diffusers"),  # for CogVideoX-Fun's programs and its nodes
    },
    reference="longtake.weights.references:cogvideox",
)
DIFFUSERS, SAT = FORMAT.as_published("diffusers"), FORMAT.as_published("sat")
