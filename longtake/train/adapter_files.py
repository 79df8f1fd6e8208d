"""Files of a run's adapters beside its folder, one set for each checkpoint, as other programs look for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from longtake.checkpoint import CheckpointWeights
from longtake.checkpoint.folder import parse_name
from longtake.durable import replace
from longtake.models.config import ModelSection
from longtake.system.pretrained import base_of_adapters, read_adapters_of
from longtake.train.config import RunConfig
from longtake.weights import Format, save_adapters


@dataclass(frozen=True)
class AdapterFiles:
    """What rank 0 writes of each checkpoint: the average of the adapters, or the adapters where the run keeps none."""

    folder: Path
    names: Mapping[str, str]  # style -> name with {step} in it
    form: Format
    model: ModelSection
    base: str | None  # the weights that they are adapters of

    @classmethod
    def of_run(cls, config: RunConfig, folder: Path) -> AdapterFiles | None:
        """Those of a run, in a folder; None where it writes none."""
        if not config.lora_files:
            return None
        base = base_of_adapters(config.model.from_pretrained, config.lora)
        return cls(folder, config.lora_files, config.family.weight_format, config.model, base)

    def write(self, checkpoint: Path) -> None:
        """Writes the files of a complete checkpoint. One of that name, of another branch of the run, is replaced."""
        adapters = read_adapters_of(CheckpointWeights(checkpoint, alone=True))
        for style, file in self._files(checkpoint).items():
            partial = file.with_name(f".partial-{file.name}")
            _remove(partial)
            save_adapters(self.form, adapters, self.model, partial, style, self.base)
            replace(partial, file)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        """Removes the files of checkpoints that are gone."""
        for checkpoint in checkpoints:
            for file in self._files(checkpoint).values():
                _remove(file)

    def _files(self, checkpoint: Path) -> dict[str, Path]:
        _, step = parse_name(checkpoint.name)
        return {style: self.folder / name.replace("{step}", str(step)) for style, name in self.names.items()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
