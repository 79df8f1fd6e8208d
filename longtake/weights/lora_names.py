"""Names of tensors in adapter files of any trainer: the layer that a tensor adapts, and its role in the adapter.

| example | trainer |
|---|---|
| `base_model.model.blocks.0.attn.to_q.lora_A.default.weight` | PEFT, with or without the adapter's name |
| `transformer.blocks.0.attn.to_q.lora_B.weight` | diffusers |
| `blocks.0.attn.to_q.lora.down.weight`, `blocks.0.attn.processor.to_q_lora.up.weight` | diffusers before PEFT |
| `diffusion_model.blocks.0.attn.to_q.lora_A.weight` | diffusion-pipe, ComfyUI |
| `lora_unet__blocks_0_attn_to_q.lora_down.weight` | kohya, CogVideoX-Fun |
| `lora_transformer_blocks_0_attn_to_q.lora_up.weight` | OneTrainer |
| `pipe.dit.blocks.0.attn.to_q.lora_A.default.weight` | DiffSynth-Studio |
| `model.diffusion_model.transformer.layers.0.attention.query_key_value.matrix_A.0` | SAT |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["a", "b", "magnitude", "alpha"]

# How a name ends. A number after SAT's matrices belongs to the layer, of which each part has its own.
_ADAPTER_NAME = r"(\.(?!weight$|bias$)[^.]+)?"
_ROLES: tuple[tuple[Role, str], ...] = (
    ("a", rf"\.lora_A{_ADAPTER_NAME}(\.weight)?"),
    ("b", rf"\.lora_B{_ADAPTER_NAME}(\.weight)?"),
    ("a", r"(\.lora_down|[._]lora\.down|\.lora_(linear_)?layer\.down)(\.weight)?"),
    ("b", r"(\.lora_up|[._]lora\.up|\.lora_(linear_)?layer\.up)(\.weight)?"),
    ("a", r"\.matrix_A(?P<number>\.\d+)?"),
    ("b", r"\.matrix_B(?P<number>\.\d+)?"),
    ("magnitude", rf"\.lora_magnitude_vector{_ADAPTER_NAME}(\.weight)?"),
    ("magnitude", r"\.dora_scale"),
    ("alpha", r"\.alpha"),
)
FLOAT8 = "float8 weights with scales"
# Ends of the tensors of other kinds of adapters, which are not read.
_OTHER_KINDS = (
    (r"hada_[wt]\d(_[ab])?", "LoHa"),
    (r"lokr_[wt]\d(_[ab])?", "LoKr"),
    (r"diff|set_weight", "a full difference of a weight"),
    (r"diff_b|set_bias", "a full difference of a bias"),
    (r"w_norm|b_norm", "a full difference of a norm"),
    (r"lora_mid(\.weight)?", "LoCon with a convolution in the middle"),
    (r"lora_(B|up)(\.[^.]+)?\.bias", "LoRA with a bias"),
    (r"lora_embedding_[AB]", "LoRA of an embedding"),
    (r"reshape_weight", "LoRA that enlarges its layer"),
    (r"oft_(blocks|diag|[RrSs])|boft_[RrSs]", "OFT"),
    (r"[ab][12]\.weight|bm\.weight", "GLoRA"),
    (r"ia3_l|on_input", "IA3"),
    (r"vera_lambda_[bd]", "VeRA"),
    (r"scale_weight|weight_scale|scale_input|input_scale|scaled_fp8", FLOAT8),
)
_TEXT_ENCODER = re.compile(
    r"(text_encoders?(_\d+)?|te\d*|t5(xxl)?|clip(_[lgh])?|cond_stage_model|conditioner)\."
    r"|(lora|lycoris)_(te\d*|t5(xxl)?|clip(_[lgh])?|text_encoder(_\d+)?)_"
)
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|\.processor(?=\.)")
_PREFIX = re.compile(r"(module|base_model\.model|pipe|model|net|unet|transformer|dit|diffusion_model|lora_unet)\.")
_FLAT_PREFIX = re.compile(r"(lora_unet|lora_transformer|lora_dit|lycoris)_")


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter: the layer's name as the file has it, without prefixes, and the tensor's role."""

    layer: str
    role: Role
    flat: bool  # dots in the layer's name are underscores


def parse_name(name: str) -> AdapterTensor | None:
    """Return the layer and role that a tensor's name says; None where it names neither LoRA nor DoRA."""
    for role, end in _ROLES:
        if match := re.fullmatch(rf"(?P<layer>.+?){end}", name):
            layer, flat = strip_prefixes(match["layer"])
            return AdapterTensor(layer + (match.groupdict().get("number") or ""), role, flat)
    return None


def strip_prefixes(layer: str) -> tuple[str, bool]:
    """Return a layer's name without what trainers put in front of it or around it; whether its dots are underscores."""
    layer = _WRAPPERS.sub("", layer)
    while match := _PREFIX.match(layer):
        layer = layer[match.end() :]
    flat = _FLAT_PREFIX.match(layer)
    return (layer, False) if flat is None else (layer[flat.end() :], True)


def flattened(layer: str) -> str:
    """Return a layer's name as trainers write it that join its parts by underscores."""
    return layer.strip("_").replace(".", "_")


def is_of_text_encoder(name: str) -> bool:
    """Return True where a tensor adapts a text encoder."""
    return _TEXT_ENCODER.match(strip_prefixes(name)[0]) is not None


def other_kind(name: str) -> str:
    """Kind of a tensor that is not part of a LoRA or DoRA adapter, as a message names it."""
    for end, kind in _OTHER_KINDS:
        if re.fullmatch(rf"(.+\.)?({end})", name):
            return kind
    return "not part of an adapter"
