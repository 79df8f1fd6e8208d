"""A trained model as one file: weights under plain names, and in its header the config that they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longtake.checkpoint import export_safetensors, resolve
from longtake.config import load_config
from longtake.contracts import UserError
from longtake.models import MMDiTConfig
from longtake.system.config import SystemConfig
from longtake.weights import ROPE_KEY, layout_of

_HEADER = "longtake_config"


def export_model(checkpoint: str, target: str | Path, part: str = "ema") -> Path:
    """Writes the weights of a checkpoint to one `.safetensors` file that `longtake generate` takes by itself.

    `checkpoint`: as for `--load`; `part`: "ema" (the weights themselves where a run kept no average) or "model".
    """
    folder = resolve(checkpoint)
    tree = load_config(folder.parent / "config.py", [], dict[str, Any]).tree
    tree = {key: value for key, value in tree.items() if key in SystemConfig.model_fields}
    rope = layout_of(MMDiTConfig(**tree.get("model", {}))).rope  # names alone do not tell the order of head channels
    return export_safetensors(folder, target, part, {_HEADER: json.dumps(tree), ROPE_KEY: rope})


def exported_tree(path: str | Path) -> dict[str, Any]:
    """The config in the header of an exported file, as plain data. Raises `UserError` for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
    if header is None:
        raise UserError(
            f"{path}: holds no Longtake config; give a config file and --model.from_pretrained {path} instead"
        )
    return json.loads(header)
