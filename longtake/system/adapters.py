"""What a run that trained adapters, or a part of the model, gives away: adapters alone, or whole weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtake.checkpoint import hold, inspect, load_tensors, read_state
from longtake.checkpoint.folder import FROZEN_FOLDER
from longtake.contracts import UserError
from longtake.models import LoraConfig, MMDiTConfig, storage
from longtake.system.export import CONFIG_HEADER, system_tree
from longtake.system.pretrained import open_pretrained
from longtake.weights import (
    ROPE_KEY,
    Adapter,
    Family,
    adapters_of,
    layout_of,
    merged,
    save_adapters,
    save_weights,
)


def export_adapters(checkpoint: str, target: str | Path, family: Family, part: str = "ema") -> Path:
    """Writes the adapters of a checkpoint as a family's file (for peft: a folder) and returns `target`.

    `checkpoint`: as for `--load`, also of a run that goes on; `part`: "ema" (the adapters themselves where a run kept
    no average) or "model". Raises `UserError` where the run trained no adapters.
    """
    with hold(checkpoint) as folder:
        tree = system_tree(folder)
        adapters = _adapters(folder, read_part(folder, part))
    if not adapters:
        raise UserError(f"{folder}: holds no adapters, for its run trained without lora; leave --lora out")
    model = MMDiTConfig(**tree.get("model", {}))
    save_adapters(adapters, model, target, family, model.from_pretrained)
    return Path(target)


def export_merged(checkpoint: str, target: str | Path, part: str = "ema", max_file_bytes: int = 5 * 2**30) -> Path:
    """Writes whole weights, adapters merged into them, to a file or folder that `longtake generate` takes by itself.

    What the run did not train comes from the file that it started from, or from its `frozen/`. A merged weight is
    computed in float32 and rounded to the dtype in which that base is written. Raises `UserError` where the file of the
    base is gone.
    """
    with hold(checkpoint) as folder, ExitStack() as stack:
        tree = system_tree(folder)
        trained = read_part(folder, part)
        weights = _Whole(trained, _adapters(folder, trained), _base(folder, tree, stack))
        tree = {key: value for key, value in tree.items() if key not in ("lora", "freeze", "train_only")}
        tree["model"] = {**tree.get("model", {}), "from_pretrained": None}
        rope = layout_of(MMDiTConfig(**tree["model"])).rope
        header = {CONFIG_HEADER: json.dumps(tree), ROPE_KEY: rope, "part": part}
        save_weights(weights, target, header, max_file_bytes)
    return Path(target)


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """The trained tensors of a checkpoint, whole, on the CPU, by plain names; "ema" falls back to "model"."""
    rows = inspect(folder).rows
    chosen = [row for row in rows if row.part == part] or [row for row in rows if row.part == "model"] * (part == "ema")
    if not chosen:
        raise UserError(
            f"{folder}: has no part '{part}'; choose one of {', '.join(sorted({row.part for row in rows}))}"
        )
    tensors = {row.name: torch.empty(row.shape, dtype=row.dtype) for row in chosen}
    load_tensors(folder, tensors)
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def _adapters(folder: Path, trained: Mapping[str, Tensor]) -> dict[str, Adapter]:
    scaling = read_state(folder).get("adapters", {})
    return adapters_of(trained, scaling.__getitem__)


def _base(folder: Path, tree: Mapping[str, Any], stack: ExitStack) -> Mapping[str, Tensor]:
    """What the run did not train, dense, by plain names; empty where it trained all. `stack` keeps it from going."""
    facts = read_state(folder).get("frozen")
    if not facts:
        return {}
    if facts["source"] is not None:
        model = MMDiTConfig(**{**tree.get("model", {}), "from_pretrained": facts["source"]})
        return stack.enter_context(open_pretrained(model))[0]
    frozen = folder.parent / FROZEN_FOLDER
    kept = read_part(frozen, "model")
    kind = LoraConfig(**(tree.get("lora") or {})).base
    dense = {name: tensor for name, tensor in kept.items() if not name.endswith("weight_scale")}
    for name in [name for name in kept if name.endswith("weight_scale")]:
        weight = name.removesuffix("_scale")
        dense[weight] = storage.decode(kept[weight], kept[name], kind, kept[name].dtype)
    return dense


class _Whole(Mapping[str, Tensor]):
    """Every weight of the model by name, made when it is asked for."""

    def __init__(
        self, trained: Mapping[str, Tensor], adapters: Mapping[str, Adapter], base: Mapping[str, Tensor]
    ) -> None:
        self.adapters, self.base = adapters, base
        owned = {f"{layer}.{kind}" for layer in adapters for kind in ("lora_a", "lora_b", "magnitude")}
        self.trained = {name: tensor for name, tensor in trained.items() if name not in owned}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.trained:
            return self.trained[name]
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in self.adapters:
            return merged(self.base[name], self.adapters[layer])
        return self.base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.trained, *self.base]))

    def __len__(self) -> int:
        return len(self.trained.keys() | self.base.keys())
