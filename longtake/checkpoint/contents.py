"""What is in a checkpoint, tensor by tensor, and its weights as one file of plain names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from longtake.checkpoint.folder import damage_sentence, read_marker, verify
from longtake.contracts import UserError
from longtake.durable import unfinished

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    when it is whole. Raises UserError where the checkpoint is damaged, or has no such part.
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
    chosen.sort(key=lambda row: (-row.dtype.itemsize, row.name))  # aligned without holes
    try:
        with unfinished(target) as partial, partial.open("wb") as stream:
            stream.write(_header(chosen, {"format": "pt", "part": chosen[0].part, **(metadata or {})}))
            for row in chosen:
                stream.write(_bytes_of(_assemble(row, saved)))
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); make room or give another place") from error
    return target


def _header(rows: Iterable[TensorRow], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON padded with blanks to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for row in rows:
        entries[row.name.split(".", 1)[1]] = {
            "dtype": _SAFETENSORS_DTYPES[row.dtype],
            "shape": list(row.shape),
            "data_offsets": [offset, offset + row.num_bytes],
        }
        offset += row.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _assemble(row: TensorRow, saved: Metadata) -> Tensor:
    """The whole tensor out of its shards, on the CPU."""
    whole = torch.empty(row.shape, dtype=row.dtype)
    for chunk in saved.state_dict_metadata[row.name].chunks:
        place = saved.storage_data[MetadataIndex(row.name, chunk.offsets)]
        with safe_open(place.relative_path, framework="pt") as file:
            index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[index] = file.get_tensor(row.name)
    return whole


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
