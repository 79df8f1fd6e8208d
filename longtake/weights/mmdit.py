"""MMDiT's files: Open-Sora 2.0's, FLUX's (BFL), and FLUX in diffusers' FluxTransformer2DModel.

    split      Open-Sora 2.0, and ours: q_proj, k_proj, v_proj; single blocks q_proj, k_proj, v_mlp (value, then MLP)
    fused      FLUX: qkv; single blocks linear1 (q, k, v, MLP); all else as in split
    diffusers  other names, every projection apart, and the last layer's modulation with scale before shift

`cond_in` has no counterpart in diffusers and keeps its name there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longtake.models.mmdit import MMDiT
from longtake.weights.format import Format, Growth, Naming, WeightLayout
from longtake.weights.lora import DIFFUSERS_STYLE, KOHYA, PEFT

_LAST = "final_layer.adaLN_modulation.1"
_SINGLE_MLP = "single_blocks.*.v_proj", "single_blocks.*.proj_mlp"  # what v_mlp is
_MODULATION = {_LAST: (f"{_LAST}.shift", f"{_LAST}.scale")}


def _apart(block: str) -> tuple[str, str, str]:
    return f"{block}.q_proj", f"{block}.k_proj", f"{block}.v_proj"


_FUSED_LAYERS = {
    "double_blocks.*.img_attn.qkv": _apart("double_blocks.*.img_attn"),
    "double_blocks.*.txt_attn.qkv": _apart("double_blocks.*.txt_attn"),
    "single_blocks.*.linear1": (*_apart("single_blocks.*"), _SINGLE_MLP[1]),
}
_DIFFUSERS_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_q": "img_attn.q_proj",
    "attn.to_k": "img_attn.k_proj",
    "attn.to_v": "img_attn.v_proj",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.to_out.0": "img_attn.proj",
    "attn.add_q_proj": "txt_attn.q_proj",
    "attn.add_k_proj": "txt_attn.k_proj",
    "attn.add_v_proj": "txt_attn.v_proj",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_DIFFUSERS_SINGLE = {
    "norm.linear": "modulation.lin",
    "attn.to_q": "q_proj",
    "attn.to_k": "k_proj",
    "attn.to_v": "v_proj",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "proj_mlp": "proj_mlp",
    "proj_out": "linear2",
}
_DIFFUSERS_LAYERS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "norm_out.linear": _MODULATION[_LAST][::-1],
    "proj_out": "final_layer.linear",
    **{f"transformer_blocks.*.{theirs}": f"double_blocks.*.{ours}" for theirs, ours in _DIFFUSERS_DOUBLE.items()},
    **{
        f"single_transformer_blocks.*.{theirs}": f"single_blocks.*.{ours}" for theirs, ours in _DIFFUSERS_SINGLE.items()
    },
}


def _own(config: Any) -> WeightLayout:
    return WeightLayout("fused" if config.fused_qkv else "split", "half" if config.use_liger_rope else "interleaved")


_KNOWN_FRAMES = Growth(
    ("cond_in.weight", "cond_in.bias"),
    note="no cond_in: it starts at zero",
    key="grow_cond_in",
    reads_known=True,
    if_missing="it is a text-to-video model: set model.grow_cond_in to True to start cond_in at zero, or "
    "model.cond_embed to False",
    if_unknown="it is an image-to-video model: set model.cond_embed to True to keep that, or model.strict_load to "
    "False to go on as a text-to-video model",
)
FORMAT = Format(
    name="MMDiT",
    sources="an Open-Sora 2.0 or FLUX file, or a folder of diffusers' FLUX",
    namings={
        "diffusers": Naming(
            _DIFFUSERS_LAYERS, signs=("x_embedder.weight", "context_embedder.weight"), growths=(_KNOWN_FRAMES,)
        ),
        "fused": Naming(
            _FUSED_LAYERS | _MODULATION,
            signs=("img_in.weight", "*_blocks.*.qkv.weight|*_blocks.*.linear1.weight"),
            growths=(_KNOWN_FRAMES,),
        ),
        "split": Naming(
            {"single_blocks.*.v_mlp": _SINGLE_MLP} | _MODULATION,
            signs=("img_in.weight",),
            rope="half",
            growths=(_KNOWN_FRAMES,),
        ),
    },
    own=_own,
    keys="model.cond_embed, guidance_embed, depth or depth_single_blocks",
    heads=("*.q_proj.*", "*.k_proj.*", "*.query_norm.*", "*.key_norm.*"),
    rows={"*.proj_mlp.*": "mlp_size"},
    lora_targets=tuple(MMDiT.tensor_plan),
    lora_styles={
        "peft": PEFT,
        "diffusers": replace(DIFFUSERS_STYLE, names="diffusers", lacks=("cond_in",)),
        "comfy": replace(KOHYA, names="fused", lacks=("cond_in",)),
    },
    reference="longtake.weights.references:mmdit",
)
OPEN_SORA_V2, FLUX, DIFFUSERS = (FORMAT.as_published(names) for names in ("split", "fused", "diffusers"))
