"""The weights of a checkpoint under plain names, whole, read as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from longtake.checkpoint.contents import TensorRow, read_metadata, rows_of
from longtake.checkpoint.folder import FROZEN_FOLDER, check_all, damage_sentence, verify
from longtake.checkpoint.state import RunState
from longtake.contracts import UserError
from longtake.parallel.world import World


class CheckpointWeights(Mapping[str, Tensor]):
    """The EMA weights of a checkpoint, or the weights themselves where the run kept no EMA; whole, on the CPU.

    Collective: the ranks share out the files and compare them with their checksums first. `weights[name]` reads one
    tensor. `part` says which weights they are, "ema" or "model". What the run did not train comes from its `frozen/`;
    where that has a file of its own, `source` names it. `wanted`: the part, "model" for the weights themselves in any
    case. `metadata`: what a file would say of them in its header. `alone`: only what was trained, by one process, just
    after it was written; nothing is compared. `prefix`: `folder.LOW_NOISE` for a second denoiser's. Raises `UserError`
    where the checkpoint is damaged or has no such part, and, unless `partly` or `alone`, where what its run did not
    train has a file of its own.
    """

    def __init__(
        self,
        folder: str | Path,
        metadata: Mapping[str, str] | None = None,
        wanted: str = "ema",
        partly: bool = False,
        alone: bool = False,
        prefix: str = "",
    ) -> None:
        self.path, self.metadata, self.prefix = Path(folder), metadata or {}, prefix
        if faults := [] if alone else check_all(self.path, World.here()):
            raise UserError(damage_sentence(self.path, faults))
        saved = read_metadata(self.path)
        rows = rows_of(saved)
        chosen = [row for row in rows if row.part == prefix + wanted]
        if not chosen and wanted == "ema":
            chosen = [row for row in rows if row.part == prefix + "model"]
        if not chosen:
            parts = ", ".join(sorted({row.part for row in rows}))
            raise UserError(f"{self.path}: has no part '{prefix}{wanted}'; choose one of {parts}")
        self.part = chosen[0].part.removeprefix(prefix)
        self._rows = {plain_name(row): (row, saved) for row in chosen}
        frozen = None if alone else RunState.read(self.path).frozen_of(prefix)
        self.source = None if frozen is None else frozen.source
        if self.source is not None and not partly:
            raise UserError(
                f"{self.path}: holds only what was trained upon {self.source}; give that as model.from_pretrained, or "
                "an export with both in it"
            )
        if frozen is not None and self.source is None:
            self._rows |= _frozen_rows(self.path.parent / (prefix + FROZEN_FOLDER))

    def __getitem__(self, name: str) -> Tensor:
        return assemble(*self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, whole, from the file headers."""
        return self._rows[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, from the file headers."""
        return self._rows[name][0].dtype


def _frozen_rows(folder: Path) -> dict[str, tuple[TensorRow, Metadata]]:
    """Return the tensors that a run did not train. Raises UserError where their folder is damaged."""
    if faults := verify(folder):
        raise UserError(damage_sentence(folder, faults))
    saved = read_metadata(folder)
    return {plain_name(row): (row, saved) for row in rows_of(saved)}


def plain_name(row: TensorRow) -> str:
    """Its name without the part."""
    return row.name.split(".", 1)[1]


def assemble(row: TensorRow, saved: Metadata) -> Tensor:
    """Return the whole tensor out of its shards, on the CPU."""
    whole = torch.empty(row.shape, dtype=row.dtype)
    for chunk in saved.state_dict_metadata[row.name].chunks:
        place = saved.storage_data[MetadataIndex(row.name, chunk.offsets)]
        with safe_open(place.relative_path, framework="pt") as file:
            index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[index] = file.get_tensor(row.name)
    return whole
