"""TTT-Video's files: the published program's, and CogVideoX-5B's, which a model starts from.

own        diffusers' names of CogVideoX but for embedders and MLPs; what is new lies in `ttt` of a block
published  of the authors' program: flat, or behind `dit.`
diffusers  a folder of CogVideoX-5B, which has no mixer
sat        the same as its own authors wrote it
"""

from __future__ import annotations

from typing import Any

from longtake.models.ttt_video import TTTVideo
from longtake.weights.cogvideox import BLOCK, LAYERS, MODULATIONS, SAT_LAYERS
from longtake.weights.format import Form, Format, Growth, Naming, WeightLayout

_SEQUENCE = "layers.*.seq_modeling_block"
_TTT = f"{_SEQUENCE}.ssm.ttt"
_PUBLISHED = {
    "time_embed.0": "time_embedding.in_layer",
    "time_embed.2": "time_embedding.out_layer",
    "patch_embedding.vid_proj": "patch_embed.proj",
    "patch_embedding.text_proj": "patch_embed.text_proj",
    "transformer_norm": "norm_final",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    "layers.*.pre_seq_layernorm": f"{BLOCK}.norm1.norm",
    "layers.*.pre_mlp_layernorm": f"{BLOCK}.norm2.norm",
    "layers.*.pre_seq_adaLN_modulation.1": MODULATIONS[f"{BLOCK}.norm1.linear"],
    "layers.*.pre_mlp_adaLN_modulation.1": MODULATIONS[f"{BLOCK}.norm2.linear"],
    "layers.*.mlp.layer1": f"{BLOCK}.ff.0",
    "layers.*.mlp.layer2": f"{BLOCK}.ff.2",
    **{f"{_SEQUENCE}.{one}": f"{BLOCK}.attn1.to_{one}" for one in "qkv"},
    f"{_SEQUENCE}.o": f"{BLOCK}.attn1.to_out",
    **{f"{_SEQUENCE}.{one}_norm": f"{BLOCK}.attn1.norm_{one}" for one in "qk"},
    **{
        f"{_SEQUENCE}.{direction}_ssm_gating_{stream}.gating_alpha": f"{BLOCK}.ttt.{direction}_gate.{stream}"
        for direction in ("forward", "backward")
        for stream in ("video", "text")
    },
    **{f"{_TTT}.{layer}": f"{BLOCK}.ttt.{layer}" for layer in ("wq", "wk", "wv", "wo", "post_norm")},
    **{f"{_TTT}.ttt_norm_{kind}": f"{BLOCK}.ttt.scan.norm_{kind}" for kind in ("weight", "bias")},
    **{f"{_TTT}.learnable_ttt_lr_{kind}": f"{BLOCK}.ttt.rate.{kind}" for kind in ("weight", "bias")},
    **{f"{_TTT}.{name}": f"{BLOCK}.ttt.scan.{name}" for name in ("W1", "b1", "W2", "b2")},
}


def _patch_shape(config: Any) -> tuple[int, ...]:
    """Of the patch embedding's weight in files, a convolution's."""
    return config.hidden_size, config.out_channels, config.patch_size, config.patch_size


_START = (
    Growth(
        (f"{BLOCK}.ttt.*",),
        note="no mixer, such as CogVideoX-5B: the one that segments know of each other by starts new",
        fill=None,
    ),
)
FORMAT = Format(
    name="TTT-Video",
    sources="a folder of CogVideoX-5B, or a checkpoint of TTT-Video",
    namings={
        "published": Naming(
            _PUBLISHED,
            signs=("patch_embedding.vid_proj.weight", "layers.0.seq_modeling_block.q.weight"),
            prefixes=("dit.",),
            forms={
                "patch_embedding.vid_proj.weight": Form(_patch_shape),
                f"{_TTT}.learnable_ttt_lr_weight": Form(
                    lambda config: (config.num_attention_heads, 1, config.hidden_size)
                ),
                f"{_TTT}.learnable_ttt_lr_bias": Form(lambda config: (config.num_attention_heads, 1)),
            },
        ),
        "diffusers": Naming(
            LAYERS | MODULATIONS,
            signs=("patch_embed.proj.weight", "time_embedding.linear_1.weight"),
            forms={"patch_embed.proj.weight": Form(_patch_shape)},
            growths=_START,
        ),
        "own": Naming(MODULATIONS, signs=("patch_embed.proj.weight", "time_embedding.in_layer.weight"), growths=_START),
        "sat": Naming(
            SAT_LAYERS,
            signs=("mixins.patch_embed.proj.weight",),
            prefixes=("model.diffusion_model.",),
            forms={"mixins.patch_embed.proj.weight": Form(_patch_shape)},
            growths=_START,
            computed=dict.fromkeys(("mixins.pos_embed.*", "*position_embeddings.weight", "*embed_tokens.weight")),
        ),
    },
    own=lambda config: WeightLayout("own"),
    keys="model.num_layers or mixer",
    torch_folders={"published": "dit."},
    lora_targets=tuple(TTTVideo.tensor_plan),
)
PUBLISHED = FORMAT.as_published("published")
