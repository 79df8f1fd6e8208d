"""Open-Sora 1.2's files: those that it published, and PixArt-Sigma's, which it started from.

published  of the model's folder, whose names are ours
pixart     PixArt-Sigma: an image model, known by its blocks, which become the spatial ones
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtake.models.stdit3 import STDiT3
from longtake.models.stdit3_config import published_config
from longtake.models.stdit3_inputs import frame_frequencies
from longtake.weights.format import Form, Format, Growth, Naming, Shape, WeightLayout
from longtake.weights.lora import PEFT
from longtake.weights.training_folder import TrainingFolder, newest_in

_PATCH = "x_embedder.proj.weight"
_EMPTY = "y_embedder.y_embedding"


def _with_last_row(given: Tensor | None, shape: Shape) -> Tensor:
    """Return the first rows that are given, the last one again where there are too few."""
    assert given is not None
    return torch.cat([given, given[-1:].expand(max(shape[0] - len(given), 0), -1)])[: shape[0]]


def _image_patch(config: Any) -> Shape:
    return config.hidden_size, config.in_channels, *config.patch_size[1:]


_TEXT_LENGTH = Growth(
    (_EMPTY,),
    note="another text length than model.model_max_length: what stands for no text is cut, or its last token repeated",
    fill=_with_last_row,
    dims=(0,),
    cut=True,
)
_NO_NORMS = "no norms of queries and keys: they start at one"
_START = (
    Growth(
        ("temporal_blocks.*",),
        note="no temporal blocks, being an image model: they start new, each as the identity",
        fill=None,
    ),
    Growth(
        ("blocks.*.attn.q_norm.weight", "blocks.*.attn.k_norm.weight"),
        note=_NO_NORMS,
        fill=None,
    ),
    Growth(("fps_embedder.*",), note="no embedder of the frame rate: it starts new, and adds nothing", fill=None),
)
FORMAT = Format(
    name="STDiT3",
    sources="a folder of Open-Sora 1.2, or a file of PixArt-Sigma",
    namings={
        "published": Naming(
            {},
            signs=(_PATCH, "fps_embedder.mlp.0.weight"),
            prefixes=("module.",),
            growths=(Growth(("*.attn.[qk]_norm.weight",), note=_NO_NORMS, fill=None, key="qk_norm"), _TEXT_LENGTH),
            computed={"rope.freqs": lambda config: frame_frequencies(config.head_dim)},
        ),
        "pixart": Naming(
            {"blocks.*": "spatial_blocks.*"},
            signs=(_PATCH, "blocks.0.cross_attn.kv_linear.weight"),
            prefixes=("state_dict.", "module."),
            forms={_PATCH: Form(_image_patch)},
            growths=(*_START, _TEXT_LENGTH),
            computed=dict.fromkeys(
                ("pos_embed", "pos_embed_temporal", "csize_embedder.*", "ar_embedder.*", "blocks.*.attn.sr.*")
            ),
            note="is PixArt-Sigma, an image model that has predicted noise; what it embeds of sizes and compresses of "
            "keys is left out",
        ),
    },
    own=lambda config: WeightLayout("published"),
    keys="model.depth or qk_norm",
    folders={"published": published_config},
    stem="model",
    lora_targets=tuple(STDiT3.tensor_plan),
    lora_styles={"peft": PEFT},
)
PIXART = FORMAT.as_published("pixart")


def training_folder(folder: Path) -> TrainingFolder | None:
    """Return a checkpoint of Open-Sora's own training, or the newest in the folder of a run; None where there
    is none."""
    newest = newest_in(folder)
    return None if newest is None else TrainingFolder(newest, frozenset({_EMPTY}))
