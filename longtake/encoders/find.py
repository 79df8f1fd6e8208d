"""Where an encoder's files lie."""

from __future__ import annotations

from pathlib import Path

from longtake.hub import find_files

_SMALL = ("*.json", "*.model", "*.txt")  # architecture and tokenizer
_WEIGHTS = ("*.safetensors", "*.bin")  # looked for in this order


def find_encoder(name: str, key: str, cache_dir: str | None = None) -> Path:
    """The local file or folder that `name`, of the config key `key`, stands for. Raises `UserError` as `find_files`."""
    return find_files(name, key, [(*_SMALL, weights) for weights in _WEIGHTS], cache_dir)
