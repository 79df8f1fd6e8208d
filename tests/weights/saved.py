"""A model's state dict as a file or folder of another layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import save_weights
from longtake.weights.format import Format, WeightLayout


def save_model(
    form: Format, state: Mapping[str, Tensor], config: Any, path: Path, target: WeightLayout, **sizes: int
) -> list[Path]:
    """Writes a state dict in the given layout; returns the files."""
    return save_weights(ConvertedWeights(form, state, config, target), path, target.header, **sizes)
