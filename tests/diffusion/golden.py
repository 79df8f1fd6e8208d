"""Reads the tensors that the reference programs made (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden" / "opensora_v2"


def read_json(name: str) -> Any:
    """The contents of a golden JSON file."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def read_tensors(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a golden safetensors file, and the settings they were made with."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["info"])  # noqa: SIM118
