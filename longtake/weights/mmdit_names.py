"""What each family of MMDiT files calls a tensor, as one table: a file's tensors are rows of named parts.

    split      Open-Sora 2.0, and ours: q_proj, k_proj, v_proj; single blocks q_proj, k_proj, v_mlp (value, then MLP)
    fused      FLUX (BFL): qkv; single blocks linear1 (q, k, v, MLP); all else as in split
    diffusers  FLUX in diffusers' FluxTransformer2DModel: other names, every projection apart, and the last layer's
               modulation with scale before shift

A part is called by its split name with the projection's letter in place of the layer (q, k, v; m: the MLP's input):
`double_blocks.0.img_attn.q.weight`, `single_blocks.3.m.bias`, `final_layer.adaLN_modulation.1.shift.weight`. Linear
weights are [out, in] everywhere. `cond_in` has no counterpart in diffusers and keeps its name there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from longtake.contracts import UserError
from longtake.models import MMDiT, MMDiTConfig

Names = Literal["split", "fused", "diffusers"]
Rope = Literal["half", "interleaved"]
ROPE_KEY = "longtake.rope"  # metadata entry of files written here


@dataclass(frozen=True)
class Layout:
    """How a state dict is written down: its names, and the order of channels in the heads of q and k."""

    names: Names
    rope: Rope


OPEN_SORA_V2 = Layout("split", "half")
FLUX = Layout("fused", "interleaved")
DIFFUSERS = Layout("diffusers", "interleaved")
_FAMILY = {layout.names: layout for layout in (OPEN_SORA_V2, FLUX, DIFFUSERS)}


@dataclass(frozen=True)
class Rows:
    """A tensor of a file: its shape, and the parts that its rows are, in order, with the number of rows of each."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]


def layout_of(config: MMDiTConfig) -> Layout:
    """The layout in which a model of this config keeps its own weights."""
    return Layout("fused" if config.fused_qkv else "split", "half" if config.use_liger_rope else "interleaved")


def detect_layout(names: Collection[str], place: str, metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a state dict with these tensor names; `place` names it in a fault.

    Names do not show the order of head channels: files written here say it in their metadata, others are taken to
    follow their family. Raises `UserError` where the names are not those of an MMDiT.
    """
    layers = {name.split(".")[-2] for name in names if name.startswith(("double_blocks.", "single_blocks."))}
    if "x_embedder.weight" in names and "context_embedder.weight" in names:
        found: Names = "diffusers"
    elif "img_in.weight" not in names:
        raise UserError(
            f"{place}: holds no MMDiT weights (no tensor img_in.weight or x_embedder.weight); give an Open-Sora 2.0 or "
            "FLUX file, or a folder of diffusers' FLUX"
        )
    elif layers & {"qkv", "linear1"}:
        if layers & {"q_proj", "v_mlp"}:
            raise UserError(
                f"{place}: mixes fused (qkv, linear1) and split (q_proj, v_mlp) tensors; give one or the other"
            )
        found = "fused"
    else:
        found = "split"
    rope = (metadata or {}).get(ROPE_KEY, _FAMILY[found].rope)
    if rope not in ("half", "interleaved"):
        raise UserError(f"{place}: its metadata says {ROPE_KEY} = {rope!r}; it must be half or interleaved")
    return Layout(found, rope)


def state_shapes(config: MMDiTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, in the model's order; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in MMDiT(config).state_dict().items()}


def file_tensors(config: MMDiTConfig, names: Names) -> dict[str, Rows]:
    """Every tensor that a file of a family has for a model of `config`.

    The sizes come from `config`; its own `fused_qkv` and `use_liger_rope` are not looked at.
    """
    shapes = state_shapes(config.model_copy(update={"fused_qkv": names == "fused"}))
    own = "fused" if names == "fused" else "split"
    tensors = {name: Rows(shape, _parts(name, shape, config, own)) for name, shape in shapes.items()}
    return tensors if names != "diffusers" else _in_diffusers(tensors)


# Which letters make up which projection, in order of rows; "parts": one each.
_APART = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
_DOUBLE = {"split": _APART, "fused": {"qkv": "qkv"}, "parts": _APART}
_SINGLE = {
    "split": {"q_proj": "q", "k_proj": "k", "v_mlp": "vm"},
    "fused": {"linear1": "qkvm"},
    "parts": {**_APART, "proj_mlp": "m"},
}


def projection_table(name: str) -> tuple[str, dict[str, dict[str, str]]]:
    """The prefix under which a parameter's projections lie, and their table; ("", empty tables) outside of blocks."""
    parts = name.split(".")
    if parts[0] == "double_blocks" and parts[2].endswith("_attn"):
        return ".".join(parts[:3]) + ".", _DOUBLE
    if parts[0] == "single_blocks":
        return ".".join(parts[:2]) + ".", _SINGLE
    return "", {"split": {}, "fused": {}, "parts": {}}


def _parts(name: str, shape: tuple[int, ...], config: MMDiTConfig, names: Names) -> tuple[tuple[str, int], ...]:
    """The parts of a tensor in split or fused names; most tensors are one part of the same name."""
    prefix, table = projection_table(name)
    layer, _, kind = name.removeprefix(prefix).rpartition(".")
    if name.startswith(_SWAPPED):
        return tuple((f"{layer}.{half}.{kind}", shape[0] // 2) for half in ("shift", "scale"))
    letters = table[names].get(layer)
    if letters is None:
        return ((name, shape[0]),)
    return tuple((f"{prefix}{part}.{kind}", config.mlp_size if part == "m" else config.hidden_size) for part in letters)


def is_of_heads(part: str) -> bool:
    """Whether the rows of a part are channels of heads that the rotation turns: q, k, and the scales of their norms."""
    return part.split(".")[-2] in ("q", "k", "query_norm", "key_norm")


# Our layers, with projections in parts -> diffusers'.
_SWAPPED = "final_layer.adaLN_modulation.1"  # shift, then scale; diffusers has them the other way round
_DIFFUSERS_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.q_proj": "attn.to_q",
    "img_attn.k_proj": "attn.to_k",
    "img_attn.v_proj": "attn.to_v",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.q_proj": "attn.add_q_proj",
    "txt_attn.k_proj": "attn.add_k_proj",
    "txt_attn.v_proj": "attn.add_v_proj",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
_DIFFUSERS_SINGLE = {
    "modulation.lin": "norm.linear",
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "proj_mlp": "proj_mlp",
    "linear2": "proj_out",
}
_DIFFUSERS_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    _SWAPPED: "norm_out.linear",
    "final_layer.linear": "proj_out",
}
_DIFFUSERS_BLOCKS = {
    "double_blocks": ("transformer_blocks", _DIFFUSERS_DOUBLE),
    "single_blocks": ("single_transformer_blocks", _DIFFUSERS_SINGLE),
}


def diffusers_layer(layer: str) -> str | None:
    """What diffusers calls a layer of ours, projections in parts; None where it has no such layer."""
    head, _, rest = layer.partition(".")
    number, _, name = rest.partition(".")
    if head not in _DIFFUSERS_BLOCKS:
        return _DIFFUSERS_OUTSIDE.get(layer)
    theirs, table = _DIFFUSERS_BLOCKS[head]
    return f"{theirs}.{number}.{table[name]}" if name in table else None


def _in_diffusers(tensors: Mapping[str, Rows]) -> dict[str, Rows]:
    """Split tensors with their projections in parts, under diffusers' names."""
    found: dict[str, Rows] = {}
    for name, rows in tensors.items():
        layer, _, kind = name.rpartition(".")
        prefix, table = projection_table(name)
        if layer == _SWAPPED:
            found[f"{diffusers_layer(layer)}.{kind}"] = Rows(rows.shape, rows.parts[::-1])
            continue
        apart = {letter: of_it for of_it, letter in table["parts"].items()}
        for part, count in rows.parts:
            letter = part.removeprefix(prefix).removesuffix(f".{kind}")
            own = prefix + apart[letter] if letter in apart else layer
            theirs = f"{diffusers_layer(own) or own}.{'weight' if kind == 'scale' else kind}"
            found[theirs] = Rows((count, *rows.shape[1:]), ((part, count),))
    return found
