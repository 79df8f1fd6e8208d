"""`model.from_pretrained`: which weights are meant, and how they get into a sharded model."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from longtake.checkpoint import CheckpointWeights, hold, is_complete, list_checkpoints
from longtake.config import load_config
from longtake.contracts import UserError
from longtake.models import MMDiTConfig, held_as
from longtake.system.lora import fill
from longtake.weights import ROPE_KEY, MMDiTWeights, layout_of


def load_pretrained(denoiser: nn.Module, config: MMDiTConfig) -> tuple[str, ...]:
    """Fills the denoiser from `config.from_pretrained`; returns what the user should know of it, one line each.

    Collective. One tensor at a time is in memory. Raises `UserError` as `MMDiTWeights`.
    """
    with open_pretrained(config) as (state, said):
        for name, value in state.items():
            fill(denoiser, held_as(denoiser, name, value))
        return (said, *state.notes)


@contextmanager
def open_pretrained(config: MMDiTConfig) -> Iterator[tuple[MMDiTWeights, str]]:
    """The weights that `config.from_pretrained` means, and a line that says which.

    A file or folder of any family that `MMDiTWeights` reads; or a checkpoint of a run, the run's folder, or a glob of
    either, of which the newest is taken, averaged where it has an average. It is not removed while it is read.
    """
    spec = config.from_pretrained
    assert spec is not None
    if not means_checkpoint(spec):
        state = MMDiTWeights(spec, config)
        yield state, f"weights: from {state.files.path}"
        return
    with hold(spec) as folder:
        weights = CheckpointWeights(folder, {ROPE_KEY: _rope_of(folder)})
        kind = "averaged (ema)" if weights.part == "ema" else "as trained"
        yield MMDiTWeights(weights, config), f"weights: {kind}, from {folder}"


def means_checkpoint(spec: str) -> bool:
    """Whether a path means a checkpoint of a run: its folder, the run's folder, or a glob of folders."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return is_complete(path) or bool(list_checkpoints(path))
    return glob.has_magic(spec) and not path.exists()


def _rope_of(folder: Path) -> str:
    """The order of head channels in a checkpoint, which follows from its run's config."""
    file = folder.parent / "config.py"
    if not file.exists():
        raise UserError(
            f"{folder}: no config.py beside it says how its weights are written; give a checkpoint in its run's folder"
        )
    tree = load_config(file, [], dict[str, Any]).tree
    return layout_of(MMDiTConfig(**tree.get("model", {}))).rope
