"""Conversions that Open-Sora 1.2's training and inference share: `model`, `vae`, `text_encoder`, `scheduler`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from longtake.config.load import load_config
from longtake.config.tree import Leaf, plain
from longtake.dialects.opensora_v1_2.keys import PARTS
from longtake.dialects.opensora_v1_2.places import weights_keys
from longtake.dialects.table import apply_rows, refuse_rest
from longtake.dialects.translation import Translation
from longtake.presets import FOLDER

SIZES: Mapping[str, Mapping[str, int]] = {
    "STDiT3-XL/2": {"hidden_size": 1152, "depth": 28, "num_heads": 16},
    "STDiT3-3B/2": {"hidden_size": 1872, "depth": 28, "num_heads": 26},
}
_SECTIONS = ("vae", "text_encoder", "scheduler")
_SCHEDULER = {"sample_method": "uniform", "use_timestep_transform": False}  # where a file leaves them out
_HUB_VAE = "hpcai-tech/OpenSora-VAE-v1.2"


def is_old(work: Translation) -> bool:
    """Return True where a file has keys of Open-Sora 1.2, which no preset has."""
    names = [name for name in (*_SECTIONS, "mask_ratios") if work.get(name) is not None]
    return bool(names) or str(work.value("model.type")).startswith("STDiT")


def translate_parts(work: Translation, old: bool, tiny: bool, trains: bool = True) -> None:
    """The four sections -> `model`, `ae`, `t5`, `objective`. old: `is_old`, of the tree as it was."""
    if (kind := work.get("model.type")) is not None and plain(kind) in SIZES:
        work.take("model.type")
        for key, size in SIZES[str(plain(kind))].items():
            if work.get(f"model.{key}") is None:
                work.put(f"model.{key}", size, kind)
        work.put("model.type", "stdit3", kind)
    elif kind is not None and str(plain(kind)).startswith("STDiT"):
        work.take("model.type")
        work.refuse("model.type", kind, "is not available", f"choose {' or '.join(SIZES)}")
    if old:  # a preset has it
        _weights(work)
    _defaults(work, trains)
    if tiny:  # which has encoders of its own
        for section in ("vae", "text_encoder"):
            work.take(section)
    apply_rows(work, PARTS)
    _autoencoder(work)
    for section in _SECTIONS:
        refuse_rest(work, section, PARTS)
    if old:
        for section, keys in _parts().items():
            own = {} if tiny and section in ("ae", "t5") else keys
            for key, value in own.items():
                work.lay(f"{section}.{key}", value)


def _weights(work: Translation) -> None:
    """`model.from_pretrained` of a file, as `--ckpt-path` there."""
    node = work.get("model.from_pretrained")
    if not isinstance(node, Leaf) or not isinstance(node.value, str) or work.heights.is_flag(node.origin):
        return
    for key, value in weights_keys(node.value).items():
        if key == "model.from_pretrained" and value != node.value:
            work.note(key, node, f"its weights are in {value}")
            work.put(key, value, node)
        elif work.get(key) is None:
            work.put(key, value, node)


def _defaults(work: Translation, trains: bool) -> None:
    node = work.get("scheduler")
    if node is None or isinstance(node, Leaf):
        return
    for key, value in _SCHEDULER.items():
        if not trains and key == "sample_method":
            continue
        if work.get(f"scheduler.{key}") is None and work.get(f"objective.{key}") is None:
            work.say(f"scheduler.{key}: is not in the file, and Open-Sora's default is {value}")
            work.put(f"scheduler.{key}", value, node)


def _autoencoder(work: Translation) -> None:
    """A folder of the autoencoder's -> the file in it."""
    node = work.get("ae.from_pretrained")
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return
    if node.value == _HUB_VAE or (Path(node.value) / "model.safetensors").is_file():
        work.put("ae.from_pretrained", f"{node.value}/model.safetensors", node)


@cache
def _parts() -> dict[str, Any]:
    tree = load_config(FOLDER / "opensora_v1_2" / "parts.py", [], dict[str, Any]).tree
    kinds = {section: {"type": tree[section]["type"]} for section in ("model", "objective")}
    return {**kinds, "ae": tree["ae"], "t5": tree["t5"]}
