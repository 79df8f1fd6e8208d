"""Shards of a latent store: safetensors files whose tensors have one row an entry, read row by row."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.small_files import regular

_HEAD_BYTES = 1 << 16
_MAPPED = 128  # shards that a process keeps mapped, those used last
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
ENDS = ".ends"  # of a tensor whose entries are of many lengths: where each ends, int64 [n]
MEND = "`longtake data encode RUN -o FOLDER --mend` makes again what is damaged"


class DamagedShard(Exception):
    """Bytes of a shard are not those that were written."""


def shard_path(folder: Path, kind: str, number: int) -> Path:
    """Return the file of a shard of `kind` ("latents" or "texts")."""
    return folder / kind / f"{number:06d}.safetensors"


def crc_of(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over the bytes of an entry's tensors, by name."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return crc


def unpadded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors [n, L, D] without the zeros that entries end with: one entry after the other, and where they end."""
    found = {}
    for name, value in tensors.items():
        if value.dim() != 3:
            found[name] = value
            continue
        filled = value.contiguous().view(torch.uint8).any(2)  # by bits: -0.0 is kept
        places = torch.arange(1, value.shape[1] + 1)
        lengths = (filled * places).amax(1)
        found |= {name: value[places <= lengths[:, None]], name + ENDS: lengths.cumsum(0)}
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that is whole or absent, and on disk when this returns. Raises OSError."""
    write_whole(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small file. Raises `UserError` where it cannot be read."""
    try:
        return load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {MEND}") from error


class LatentShards:
    """The shards of a store, mapped into memory when first read; the least recently used are let go."""

    def __init__(self, folder: Path, tensors: Mapping[str, Mapping[str, Any]] | None = None):
        """`tensors`: kind -> name -> {"dtype", "shape"}, of what shards must hold; None: whatever it is."""
        self.folder, self.tensors = folder, tensors or {}
        self._mapped = lru_cache(_MAPPED)(self._open)

    def read(self, kind: str, number: int, row: int, crc: int) -> dict[str, Tensor]:
        """One row of each tensor, copied. Raises `DamagedShard` where their CRC-32 is not `crc`."""
        file = self._mapped(kind, number)
        try:
            names = [name for name in file.keys() if not name.endswith(ENDS)]  # noqa: SIM118 (no mapping)
            found = {name: self._entry(file, kind, name, row) for name in names}
        except (IndexError, SafetensorError) as error:
            raise DamagedShard(f"{kind}/{number:06d}.safetensors is cut short: it has no row {row}") from error
        if crc_of(found) != crc:
            raise DamagedShard(f"row {row} of {kind}/{number:06d}.safetensors has another checksum than when written")
        return found

    def _entry(self, file: safe_open, kind: str, name: str, row: int) -> Tensor:
        """One row of a tensor, with the zeros that it ended with."""
        if name + ENDS not in file.keys():  # noqa: SIM118
            return file.get_slice(name)[row].clone()
        ends = file.get_slice(name + ENDS)
        start, end = ends[row - 1 : row].sum().item(), ends[row].item()
        value = file.get_slice(name)[start:end]
        return F.pad(value, (0, 0, 0, self.tensors[kind][name]["shape"][0] - len(value)))

    def fault(self, kind: str, number: int, num_rows: int) -> str | None:
        """What is wrong with a shard's file by its size and header; None if nothing."""
        try:
            file = self._open(kind, number)
        except DamagedShard as error:
            return str(error)
        names = set(file.keys())
        counted = (name for name in names if name + ENDS not in names)
        if any(file.get_slice(name).get_shape()[:1] != [num_rows] for name in counted):
            return f"{kind}/{number:06d}.safetensors does not have the {num_rows} rows that the index names"
        return None

    def _open(self, kind: str, number: int) -> safe_open:
        path = shard_path(self.folder, kind, number)
        try:
            with open(regular(path), "rb") as head:  # waits for a slow disk as other threads run, unlike `safe_open`
                head.read(_HEAD_BYTES)
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise DamagedShard(f"{kind}/{number:06d}.safetensors is cut short or cannot be read ({error})") from error
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, entry in self.tensors.get(kind, {}).items():
            wanted = DTYPES[entry["dtype"]], len(entry["shape"]) + (name + ENDS not in found)
            if name not in found or (found[name].get_dtype(), len(found[name].get_shape())) != wanted:
                raise DamagedShard(f"{kind}/{number:06d}.safetensors: its {name!r} is not what the store holds")
        return file
