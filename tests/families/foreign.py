"""Latents and embeddings as another program keeps them: a JSONL with a line for each clip, tensors frames first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from longtake.data import ClipTable, EncoderFacts
from longtake.data.latents.source import ListedLatents, read_list
from longtake.train import RunConfig

Tensors = Mapping[str, torch.Tensor]
Load = Callable[[str], Any]


def open_list(config: RunConfig, table: ClipTable) -> ListedLatents:
    """What a family names for `*.jsonl`."""
    path = Path(str(config.dataset.latents))
    empty = dict(torch.load(path.parent / "empty.pt", weights_only=True))
    facts = EncoderFacts(config.ae.latent, config.text_length, empty)
    lines = read_list(path, "clip", [Path(table.written_path(row)).name for row in range(len(table))])
    parts = 0 if config.family.segments is None else 1  # axes of captions before those of each
    texts = {
        name: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[parts:])}
        for name, value in load_file(path.parent / "last.safetensors").items()
    }
    names = torch.load(path.parent / "last.pt", weights_only=True)
    latents = {name: {"dtype": "float32", "shape": list("CFhw")} for name in names}
    return ListedLatents(path, lines, facts, latents, texts, read_latents, read_texts)


def read_latents(line: Mapping[str, Any], load: Load) -> Tensors:
    return {name: moment.transpose(0, 1).contiguous() for name, moment in load(line["vid_emb"]).items()}


def read_texts(line: Mapping[str, Any], load: Load) -> Tensors:
    return dict(load(line["text_emb"]))
