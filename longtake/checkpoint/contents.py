"""What is in a checkpoint, tensor by tensor, and its weights as one file of plain names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from longtake.checkpoint.folder import FROZEN_FOLDER, damage_sentence, read_marker, read_state, verify
from longtake.checkpoint.layout import SAFETENSORS_DTYPES, bytes_of, safetensors_head
from longtake.contracts import UserError
from longtake.durable import unfinished


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
    rows = _rows(_metadata(Path(folder)))
    parts = sorted({row.part for row in rows})
    return Contents(tuple(rows), {part: _total(row for row in rows if row.part == part) for part in parts})


def _total(rows: Iterable[TensorRow]) -> PartTotal:
    rows = list(rows)
    return PartTotal(
        len(rows), sum(row.num_bytes // row.dtype.itemsize for row in rows), sum(row.num_bytes for row in rows)
    )


def _metadata(folder: Path) -> Metadata:
    read_marker(folder)
    try:
        return HuggingFaceStorageReader(str(folder)).read_metadata()
    except Exception as error:
        faults = verify(folder)
        if not faults:
            raise
        raise UserError(damage_sentence(folder, faults)) from error


def _rows(metadata: Metadata) -> list[TensorRow]:
    rows = []
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        dtype = saved.properties.dtype
        rows.append(TensorRow(name, tuple(saved.size), dtype, saved.size.numel() * dtype.itemsize))
    return rows


def export_safetensors(
    folder: str | Path, target: str | Path, part: str = "ema", metadata: Mapping[str, str] | None = None
) -> Path:
    """Write the weights of a checkpoint as one safetensors file with plain parameter names, and return its path.

    `part`: `ema` (falls back to `model` where the run kept no EMA) or `model`. `metadata`: strings for the file's
    header, beside `format` and `part`. Dtypes stay as saved. One tensor at a time is in memory. `target` appears only
    when it is whole. What the run did not train comes from its `frozen/`; where that has a file of its own, the export
    holds the trained weights alone and names the file as `frozen_source`. Raises UserError where the checkpoint is
    damaged, or has no such part.
    """
    folder, target = Path(folder), Path(target)
    faults = verify(folder)
    if faults:
        raise UserError(damage_sentence(folder, faults))
    saved = _metadata(folder)
    rows = _rows(saved)
    chosen = [row for row in rows if row.part == part] or [row for row in rows if row.part == "model"] * (part == "ema")
    if not chosen:
        parts = ", ".join(sorted({row.part for row in rows}))
        raise UserError(f"{folder}: has no part '{part}'; choose one of {parts}")
    found = [(row, saved) for row in chosen]
    frozen = read_state(folder).get("frozen")
    if frozen and frozen["source"] is None:
        found += _frozen_rows(folder.parent / FROZEN_FOLDER)
    elif frozen:
        metadata = {**(metadata or {}), "frozen_source": frozen["source"]}
    found.sort(key=lambda pair: (-pair[0].dtype.itemsize, pair[0].name.split(".", 1)[1]))  # aligned without holes
    rows = [row for row, _ in found]
    try:
        with unfinished(target) as partial, partial.open("wb") as stream:
            stream.write(_header(rows, {"format": "pt", "part": chosen[0].part, **(metadata or {})}))
            for row, source in found:
                stream.write(memoryview(bytes_of(_assemble(row, source)).numpy()))
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); make room or give another place") from error
    return target


def _frozen_rows(folder: Path) -> list[tuple[TensorRow, Metadata]]:
    """The tensors that a run did not train. Raises UserError where their folder is damaged."""
    if faults := verify(folder):
        raise UserError(damage_sentence(folder, faults))
    saved = _metadata(folder)
    return [(row, saved) for row in _rows(saved)]


def _header(rows: Iterable[TensorRow], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file that holds the rows under their plain names."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for row in rows:
        entries[row.name.split(".", 1)[1]] = {
            "dtype": SAFETENSORS_DTYPES[row.dtype],
            "shape": list(row.shape),
            "data_offsets": [offset, offset + row.num_bytes],
        }
        offset += row.num_bytes
    return safetensors_head(entries)


def _assemble(row: TensorRow, saved: Metadata) -> Tensor:
    """The whole tensor out of its shards, on the CPU."""
    whole = torch.empty(row.shape, dtype=row.dtype)
    for chunk in saved.state_dict_metadata[row.name].chunks:
        place = saved.storage_data[MetadataIndex(row.name, chunk.offsets)]
        with safe_open(place.relative_path, framework="pt") as file:
            index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[index] = file.get_tensor(row.name)
    return whole
