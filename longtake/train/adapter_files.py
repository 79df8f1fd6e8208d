"""Files of a run's adapters beside its folder, one set for each checkpoint, as other programs look for them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from longtake.checkpoint.export import CheckpointWeights
from longtake.checkpoint.folder import parse_name
from longtake.contracts import UserError
from longtake.durable import replace, write_whole
from longtake.models.build import build_denoiser
from longtake.models.config import ModelSection
from longtake.small_files import read_object
from longtake.system.lora import choose_trained
from longtake.system.pretrained import base_of_adapters, read_adapters_of
from longtake.train.config import RunConfig
from longtake.weights.adapters import adapters_of
from longtake.weights.format import Format
from longtake.weights.lora import check_style, save_adapters

NAMES_FILE = "lora_files.json"  # in the run's folder
_STEP = "{step}"


def own_names(wanted: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the names of a run's files (style -> name with {step} in it): those that are wanted, with the run's
    behind the step where files of another run or program have them already. A run keeps the names that it has got."""
    before = _names_in(run)
    with_run = {style: name.replace(_STEP, f"{_STEP}-{run.name}") for style, name in wanted.items()}
    if before in (wanted, with_run):
        return before
    others = {name for path in run.parent.iterdir() if path != run for name in _names_in(path).values()}
    new = set(wanted.values()) - set(before.values())
    files = re.compile("|".join(re.escape(name).replace(re.escape(_STEP), r"\d+") for name in new) or "(?!)")
    lying = any(files.fullmatch(path.name) for path in run.parent.iterdir())
    names = dict(wanted) if others.isdisjoint(wanted.values()) and not lying else with_run
    write_whole(run / NAMES_FILE, json.dumps(names) + "\n")
    return names


def _names_in(run: Path) -> dict[str, str]:
    """Return the names that a run has got; none where the folder is no run's, or cannot be read."""
    try:
        return {style: str(name) for style, name in read_object(run / NAMES_FILE, {}, "").items()}
    except (OSError, UserError):
        return {}


@dataclass(frozen=True)
class AdapterFiles:
    """Adapter files that rank 0 writes at each checkpoint: the EMA of the adapters, or the adapters where there is no
    EMA."""

    folder: Path
    names: Mapping[str, str]  # style -> name with {step} in it
    form: Format
    model: ModelSection
    base: str | None  # the weights that they are adapters of

    @classmethod
    def of_run(cls, config: RunConfig, folder: Path, names: Mapping[str, str]) -> AdapterFiles:
        """Create the adapter files of a run, in a folder. Raises `UserError` where a style cannot hold the layers that
        the run adapts."""
        with torch.device("meta"):
            denoiser = build_denoiser(config.model)
            choose_trained(denoiser, config, torch.float32)
        adapters = adapters_of(dict(denoiser.named_parameters()), 1.0)
        for style in names:
            check_style(config.family.weight_format, adapters, config.model, style)
        base = base_of_adapters(config.model.from_pretrained, config.lora)
        return cls(folder, names, config.family.weight_format, config.model, base)

    def write(self, checkpoint: Path) -> None:
        """Write the files of a complete checkpoint of the run in place of those that it has written of that step."""
        adapters = read_adapters_of(CheckpointWeights(checkpoint, alone=True))
        for style, file in self._files(checkpoint).items():
            partial = file.with_name(f".partial-{file.name}")
            _remove(partial)
            save_adapters(self.form, adapters, self.model, partial, style, self.base)
            replace(partial, file)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        """Remove the files of checkpoints that are gone."""
        for checkpoint in checkpoints:
            for file in self._files(checkpoint).values():
                _remove(file)

    def _files(self, checkpoint: Path) -> dict[str, Path]:
        _, step = parse_name(checkpoint.name)
        return {style: self.folder / name.replace(_STEP, str(step)) for style, name in self.names.items()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
