"""The weights of a checkpoint as a mapping of plain parameter names, for a model of another shape or layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from longtake.checkpoint.export import assemble, choose_tensors, plain_name
from longtake.checkpoint.folder import check_all, damage_sentence
from longtake.contracts import UserError
from longtake.parallel import World


class CheckpointWeights(Mapping[str, Tensor]):
    """The EMA weights of a checkpoint, or the weights themselves where the run kept no EMA; whole, on the CPU.

    Collective: the ranks share out the files and compare them with their checksums first. `folder[name]` reads one
    tensor. `part` says which weights they are, "ema" or "model". What the run did not train comes from its `frozen/`.
    `metadata`: what a file would say of them in its header. `wanted`: the part, "model" for the weights themselves in
    any case. Raises `UserError` where the checkpoint is damaged, or holds only a part of the model's weights, since
    those that its run did not train have a file of their own; with `partly` it is read all the same.
    """

    def __init__(
        self,
        folder: str | Path,
        metadata: Mapping[str, str] | None = None,
        wanted: str = "ema",
        partly: bool = False,
    ) -> None:
        self.path = Path(folder)
        if faults := check_all(self.path, World.here()):
            raise UserError(damage_sentence(self.path, faults))
        found, header = choose_tensors(self.path, wanted)
        if "frozen_source" in header and not partly:
            raise UserError(
                f"{self.path}: holds only what was trained upon {header['frozen_source']}; give that as "
                "model.from_pretrained, or an export with both in it"
            )
        self.part = header["part"]
        self.metadata: Mapping[str, str] = metadata or {}
        self._rows = {plain_name(row): (row, saved) for row, saved in found}

    def __getitem__(self, name: str) -> Tensor:
        return assemble(*self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, whole, from the file headers."""
        return self._rows[name][0].shape
