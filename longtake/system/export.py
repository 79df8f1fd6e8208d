"""A trained model as a file or a folder: weights under plain names, and in the header the config that they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longtake.checkpoint import EXPORT_BYTES, INDEX_FILE, export_safetensors, hold
from longtake.config import load_config
from longtake.contracts import UserError
from longtake.models import MMDiTConfig
from longtake.system.config import SystemConfig
from longtake.system.trained_size import said_sampling, trained_size
from longtake.weights import ROPE_KEY, layout_of

CONFIG_HEADER = "longtake_config"


def export_model(checkpoint: str, target: str | Path, part: str = "ema", max_file_bytes: int = EXPORT_BYTES) -> Path:
    """Writes the weights of a checkpoint to one `.safetensors` file that `longtake generate` takes by itself.

    A `target` of another name becomes a folder in Hugging Face's layout, of files of `max_file_bytes` at most.
    `checkpoint`: as for `--load`, also of a run that goes on; `part`: "ema" (the weights themselves where a run kept no
    average) or "model".
    """
    with hold(checkpoint) as folder:
        tree = system_tree(folder)
        if tree.get("lora"):
            raise UserError(
                f"{folder}: trained adapters; write --lora peft, diffusers or comfy for these alone, or --merge for "
                "whole weights"
            )
        rope = layout_of(MMDiTConfig(**tree.get("model", {}))).rope  # names do not tell the order of head channels
        header = {CONFIG_HEADER: json.dumps(tree), ROPE_KEY: rope}
        return export_safetensors(folder, target, part, header, max_file_bytes)


def system_tree(checkpoint: Path) -> dict[str, Any]:
    """The keys of a checkpoint's run that say what its model is and how it is sampled, at the size of its buckets."""
    tree = load_config(checkpoint.parent / "config.py", [], dict[str, Any]).tree
    whole = {**tree, "sampling_option": {**said_sampling(tree), **trained_size(tree)}}
    return {key: value for key, value in whole.items() if key in SystemConfig.model_fields}


def is_exported_folder(path: str | Path) -> bool:
    """Whether `export_model` may have written this folder."""
    return any((Path(path) / name).is_file() for name in (INDEX_FILE, "model.safetensors"))


def exported_tree(path: str | Path) -> dict[str, Any]:
    """The config in the header of an exported file or folder, as plain data. Raises `UserError` for any other."""
    path = min(Path(path).glob("model*.safetensors"), default=path) if Path(path).is_dir() else path
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(CONFIG_HEADER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    if header is None:
        raise UserError(
            f"{path}: holds no Longtake config; give a config file and --model.from_pretrained {path} instead"
        )
    return json.loads(header)
