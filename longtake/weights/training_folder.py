"""Checkpoint folders of training with ColossalAI's booster, as Open-Sora writes them, read without running anything.

    epochE-global_stepS/
      model/                pytorch_model-0000N.bin and an index: the working weights, in the order of the parameters
      ema.pt                their averages, float32
      optimizer/            pytorch_optim-0000N.bin and an index: exp_avg, exp_avg_sq and step of each parameter that
                            trains, by its number in that order; pytorch_optim_group.bin
      lr_scheduler          not read: rates follow from the number of updates
      running_states.json   epoch, step of it that is next, global_step
      sampler               micro-batches of the epoch that are done

Masters in float32 and random states are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from longtake.contracts import UserError
from longtake.small_files import read_object
from longtake.weights.files import WeightFiles
from longtake.weights.pickles import load_plain

MOMENTS = ("exp_avg", "exp_avg_sq")
_PLACE, _GROUPS, _INDEX = "running_states.json", "pytorch_optim_group.bin", "pytorch_optim.bin.index.json"
_COPY = "copy the folder again, or start from its weights alone: model.from_pretrained"


def newest_in(folder: Path) -> Path | None:
    """Return the folder itself where it is such a checkpoint, else the one of the highest step in it; None where
    there is none."""
    steps = {path: re.search(r"global_step(\d+)$", path.name) for path in folder.glob("epoch*-global_step*")}
    inner = sorted((path for path in steps if steps[path]), key=lambda path: int(steps[path][1]), reverse=True)
    return next((one for one in (folder, *inner) if (one / _PLACE).is_file() and (one / "model").is_dir()), None)


@dataclass(frozen=True)
class TrainingFolder:
    """Such a checkpoint. Its methods raise `UserError` for what is damaged or not there."""

    path: Path
    buffers: frozenset[str] = frozenset()  # names in `model` that no optimizer sees

    @property
    def weights(self) -> Path:
        """The folder of weights."""
        return self.path / "model"

    @property
    def averages(self) -> Path | None:
        """The file of averages, if there is one."""
        file = self.path / "ema.pt"
        return file if file.is_file() else None

    @cached_property
    def place(self) -> dict[str, Any]:
        """`epoch`, and `step` of it that is next."""
        return read_object(self.path / _PLACE, {"epoch": int, "step": int, "global_step": int}, _COPY)

    @cached_property
    def micro_batches(self) -> int | None:
        """Micro-batches of the pass that are done, over all ranks; None where the folder does not say."""
        file = self.path / "sampler"
        found = load_plain(file).get("last_micro_batch_access_index") if file.is_file() else None
        return found if isinstance(found, int) else None

    def moments(self, trained: Collection[str]) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Name, number of updates and `MOMENTS` of each parameter that has been updated, `trained` being the names of
        those that the optimizer was given. One file is mapped at a time."""
        folder = self.path / "optimizer"
        if not (folder / _INDEX).is_file():
            raise UserError(f"{folder}: has no {_INDEX}, so the optimizer's state is not there; {_COPY}")
        table = read_object(folder / _INDEX, {"weight_map": dict}, _COPY)["weight_map"]
        weights = WeightFiles(self.weights)
        names = [name for name in weights if name in trained and name not in self.buffers]
        try:
            numbers = [number for group in load_plain(folder / _GROUPS) for number in group["params"]]
            if len(names) != len(numbers):
                raise UserError(
                    f"{folder}: has moments of {len(numbers)} parameters, and the run trains {len(names)} of those in "
                    f"{self.weights}; train the same ones (freeze, train_only, lora)"
                )
            of_number = dict(zip(numbers, names, strict=True))
            for file in sorted({Path(name).name for name in table.values()}):
                for number, state in load_plain(folder / file).items():
                    name = of_number[number]
                    yield name, int(state["step"]), {key: self._as(weights, name, state[key], file) for key in MOMENTS}
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder}: is of another form ({type(error).__name__}: {error}); {_COPY}") from None

    def _as(self, weights: WeightFiles, name: str, moment: Tensor, file: str) -> Tensor:
        shape = weights.shape(name)
        if moment.numel() != prod(shape) or (moment.dim() > 1 and tuple(moment.shape) != shape):
            raise UserError(
                f"{self.path / 'optimizer' / file}: moments of size {list(moment.shape)} stand where those of {name}, "
                f"{list(shape)}, are expected; train the same parameters (freeze, train_only)"
            )
        return moment.reshape(shape)
