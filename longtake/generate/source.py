"""What a generation is made from: a config file, a training run, one of its checkpoints, or an exported file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.checkpoint import inspect, load_tensors
from longtake.checkpoint import resolve as resolve_checkpoint
from longtake.config import load_config
from longtake.config import resolve as resolve_config
from longtake.contracts import UserError
from longtake.generate.config import GenerateConfig
from longtake.system import System, SystemConfig, exported_tree


@dataclass(frozen=True)
class Source:
    """A resolved generation config and, where it is made from a training run, the checkpoint to load."""

    config: GenerateConfig
    checkpoint: Path | None


def resolve_source(run: str, overrides: Sequence[str]) -> Source:
    """Reads what `run` names. The model's own keys come from the run or exported file, the rest from `overrides`.

    `run`: a config file (.py, .toml), a `.safetensors` file written by `longtake checkpoint export`, or anything that
    `--load` takes: a checkpoint folder, a run folder, a glob, `latest`. Raises `UserError` where it is none of these.
    """
    path = Path(run)
    if path.suffix in (".py", ".toml"):
        return Source(load_config(path, overrides, GenerateConfig).value, None)
    if path.suffix == ".safetensors":
        tree = _system_part(exported_tree(path))
        tree["model"] = {**tree.get("model", {}), "from_pretrained": str(path)}
        return Source(resolve_config(tree, overrides, GenerateConfig).value, None)
    checkpoint = resolve_checkpoint(run)
    file = checkpoint.parent / "config.py"
    if not file.exists():
        raise UserError(f"{checkpoint.parent}: no config.py beside the checkpoint; give the folder of a training run")
    tree = _system_part(load_config(file, [], dict[str, Any]).tree)
    tree["model"] = {**tree.get("model", {}), "from_pretrained": None}
    config = resolve_config(tree, overrides, GenerateConfig).value
    return Source(config, None if config.model.from_pretrained else checkpoint)


def load_weights(system: System, checkpoint: Path, ema: bool) -> str:
    """Fills the denoiser from a checkpoint: its averaged weights where wanted and there, else the weights themselves.

    Returns which were taken, "ema" or "model". Collective.
    """
    part = "ema" if ema and "ema" in inspect(checkpoint).totals else "model"
    into = {f"{part}.{name}": p.data for name, p in system.denoiser.named_parameters()}
    load_tensors(checkpoint, into)
    return part


def _system_part(tree: dict[str, Any]) -> dict[str, Any]:
    """The keys of a training config that describe the model and how it is sampled.

    How training was spread over its processes is left out: a generation has its own number of them.
    """
    return {key: value for key, value in tree.items() if key in SystemConfig.model_fields and key != "parallel"}
