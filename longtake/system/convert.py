"""Weights of any naming as a file or folder of Longtake's own, complete: what a file lacks is there at its start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import SerializeAsAny, field_validator
from torch import Tensor

from longtake.config.dump import plain_data
from longtake.config.load import resolve
from longtake.config.section import Section
from longtake.contracts import UserError
from longtake.families.registry import default_model, family_of, published_sections
from longtake.hub import find_files
from longtake.models.build import build_denoiser
from longtake.models.config import ModelSection
from longtake.models.initial import initial_values
from longtake.system.config import SystemConfig
from longtake.system.export import CONFIG_HEADER, write_torch_folder
from longtake.system.pretrained import open_pretrained
from longtake.weights.conversion import state_shapes
from longtake.weights.files import MOST_FILE_BYTES, save_weights

_FACTS = ("model_index.json", "config.json", "*/*.json")
# What is fetched of a repository: a whole published model's denoiser, or a denoiser by itself.
_WANTED = ((*_FACTS, "transformer/*.safetensors"), ("config.json", "*.safetensors"))


def convert_weights(
    source: str,
    target: str | Path,
    overrides: Sequence[str] = (),
    max_file_bytes: int = MOST_FILE_BYTES,
    names: str | None = None,
) -> list[str]:
    """Write the weights that `source` means, a file or folder of any naming or a name on the Hugging Face hub, to a
    file or folder that training starts from and `longtake generate` takes by itself; return what there is to say.

    overrides: flags that say what the model is, where the source does not: `--model.type`, `--seed` and so on. What
    the source lacks has the value that a run with the same seed would start it with. `names`: a naming of which the
    model's format has folders of PyTorch's distributed checkpoint; such a one is written. Raises `UserError` and
    `ConfigError`.
    """
    place = str(find_files(source, "SOURCE", _WANTED))
    tree = resolve({"model": {"from_pretrained": place}}, overrides, dict[str, Any], place=source).tree
    is_whole = "ae" in tree or published_sections(tree) is not None
    config = resolve(
        {"model": {"from_pretrained": place}}, overrides, SystemConfig if is_whole else _ModelAlone, source
    ).value
    model = config.model
    if names is not None and names not in (can := family_of(model).weight_format.torch_folders):
        raise UserError(f"--as {names}: is no folder that can be written; choose {' or '.join(can) or 'none'}")
    with open_pretrained(model) as (weights, said):
        whole = _Whole(weights, config)
        kept = {"model": model.model_copy(update={"from_pretrained": None})}
        if is_whole:
            beside = ("ae", "objective", *(text.section for text in family_of(model).texts))
            kept |= {name: getattr(config, name) for name in beside}
        tree, form = {name: plain_data(section) for name, section in kept.items()}, family_of(model).weight_format
        if names is not None:
            write_torch_folder(form, names, whole, model, target, tree)
        else:
            header = {CONFIG_HEADER: json.dumps(tree), **form.own(model).header}
            save_weights(whole, target, header, max_file_bytes)
    drawn = len(whole) - len(weights)
    made = [f"{drawn} of {len(whole)} tensors start anew, by seed {config.seed}"] if drawn else []
    if not is_whole:
        made.append("the source says nothing of autoencoder, texts and schedule: videos want a preset that does")
    return [said, *weights.notes, *made]


class _ModelAlone(Section):
    """Config of a denoiser alone."""

    model: SerializeAsAny[ModelSection]
    seed: int = SystemConfig.model_fields["seed"].default

    @field_validator("model", mode="before")
    @classmethod
    def _of_the_default_family(cls, value: Any) -> Any:
        return {"type": default_model().type, **value} if isinstance(value, Mapping) else value


class _Whole(Mapping[str, Tensor]):
    """Every tensor of a model: those of a file, and others as a run begins with them, in float32."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any) -> None:
        self._weights, self._seed = weights, config.seed
        self._shapes = state_shapes(config.model)
        with torch.device("meta"):
            self._denoiser = build_denoiser(config.model)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._weights:
            return self._weights[name]
        made = initial_values(self._denoiser, name, self._seed)
        if name not in made:
            raise UserError(f"{name}: the source lacks it and nothing says how it starts; give whole weights")
        return made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
