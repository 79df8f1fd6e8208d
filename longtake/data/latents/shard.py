"""Shards of a latent store: safetensors files whose tensors have one row an entry, read row by row."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.contracts import UserError

_MAPPED = 128  # shards that a process keeps mapped
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class DamagedShard(Exception):
    """Bytes of a shard are not those that were written."""


def shard_path(folder: Path, kind: str, number: int) -> Path:
    """The file of a shard of `kind` ("latents" or "texts")."""
    return folder / kind / f"{number:06d}.safetensors"


def crc_of(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over the bytes of an entry's tensors, by name."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file that is whole or absent, and on disk when this returns. Raises OSError."""
    partial = partial_name(path)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        settle(partial, path)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(f"{path}: cannot be written ({error})") from error
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A name for a file under way, of its own on every machine; `settle` gives it the right one."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


def settle(partial: Path, path: Path) -> None:
    """Gives a written file its name, once its bytes are on disk."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small file. Raises `UserError` where it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); repeat `longtake data encode`") from error


@dataclass(frozen=True)
class _Rows:
    """Where the rows of one tensor lie in a shard's file."""

    start: int
    row_bytes: int
    num_rows: int
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype


class Shards:
    """The shards of a store, mapped into memory when first read; the least recently used are let go."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: OrderedDict[tuple[str, int], tuple[np.memmap, dict[str, _Rows]]] = OrderedDict()

    def read(self, kind: str, number: int, row: int, crc: int) -> dict[str, Tensor]:
        """One row of each tensor, copied. Raises `DamagedShard` where their CRC-32 is not `crc`."""
        data, places = self._mapped(kind, number)
        found = {}
        for name, place in places.items():
            start = place.start + row * place.row_bytes
            values = np.array(data[start : start + place.row_bytes])
            if row >= place.num_rows or len(values) < place.row_bytes:
                raise DamagedShard(f"{kind}/{number:06d}.safetensors is cut short")
            found[name] = torch.from_numpy(values).view(place.dtype).view(place.shape)
        if crc_of(found) != crc:
            raise DamagedShard(f"row {row} of {kind}/{number:06d}.safetensors has another checksum than when written")
        return found

    def fault(self, kind: str, number: int, num_rows: int) -> str | None:
        """What is wrong with a shard's file by its size and header; None if nothing."""
        path = shard_path(self.folder, kind, number)
        try:
            size, places = path.stat().st_size, read_header(path)
        except (OSError, DamagedShard) as error:
            return f"{kind}/{number:06d}.safetensors cannot be read ({error})"
        if any(place.start + place.row_bytes * place.num_rows > size for place in places.values()):
            return f"{kind}/{number:06d}.safetensors is cut short"
        if any(place.num_rows != num_rows for place in places.values()):
            return f"{kind}/{number:06d}.safetensors has not the {num_rows} rows that the index names"
        return None

    def _mapped(self, kind: str, number: int) -> tuple[np.memmap, dict[str, _Rows]]:
        key = kind, number
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = shard_path(self.folder, kind, number)
        try:
            found = np.memmap(path, np.uint8, mode="r"), read_header(path)
        except (OSError, ValueError) as error:
            raise DamagedShard(f"{kind}/{number:06d}.safetensors cannot be read ({error})") from error
        self._open[key] = found
        if len(self._open) > _MAPPED:
            self._open.popitem(last=False)
        return found


def read_header(path: Path) -> dict[str, _Rows]:
    """Where the tensors of a safetensors file lie. Raises OSError, and `DamagedShard` for another kind of file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise DamagedShard("no safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text)
        return {name: _rows(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedShard("no safetensors file") from error


def _rows(entry: Mapping, data_start: int) -> _Rows:
    begin, end = entry["data_offsets"]
    num_rows, *shape = entry["shape"]
    return _Rows(data_start + begin, (end - begin) // num_rows, num_rows, tuple(shape), _DTYPES[entry["dtype"]])
