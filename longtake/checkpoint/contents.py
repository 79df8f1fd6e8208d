"""What is in a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from longtake.checkpoint.folder import damage_sentence, read_marker, verify
from longtake.contracts import UserError


@dataclass(frozen=True)
class TensorRow:
    """One saved tensor, whole: its shape is that of all shards together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    @property
    def part(self) -> str:
        """`model`, `ema`, `optim` …: the name up to its first dot."""
        return self.name.split(".")[0]


@dataclass(frozen=True)
class PartTotal:
    """Sums over the tensors of one part."""

    num_tensors: int
    num_elements: int
    num_bytes: int


@dataclass(frozen=True)
class Contents:
    """All tensors of a checkpoint by name, and the totals of each part."""

    rows: tuple[TensorRow, ...]
    totals: Mapping[str, PartTotal]


def inspect(folder: str | Path) -> Contents:
    """List the tensors of a checkpoint from its file headers; no tensor is read. Raises UserError as `read_marker`."""
    rows, totals = rows_of(read_metadata(Path(folder))), {}
    for part in sorted({row.part for row in rows}):
        own = [row for row in rows if row.part == part]
        num_elements = sum(row.num_bytes // row.dtype.itemsize for row in own)
        totals[part] = PartTotal(len(own), num_elements, sum(row.num_bytes for row in own))
    return Contents(tuple(rows), totals)


def read_metadata(folder: Path) -> Metadata:
    """Shape, dtype and shards of every tensor of a checkpoint. Raises UserError where that cannot be read."""
    read_marker(folder)
    try:
        return HuggingFaceStorageReader(str(folder)).read_metadata()
    except Exception as error:
        faults = verify(folder)
        if not faults:
            raise
        raise UserError(damage_sentence(folder, faults)) from error


def rows_of(metadata: Metadata) -> list[TensorRow]:
    """Return the tensors by name."""
    rows = []
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        dtype = saved.properties.dtype
        rows.append(TensorRow(name, tuple(saved.size), dtype, saved.size.numel() * dtype.itemsize))
    return rows
