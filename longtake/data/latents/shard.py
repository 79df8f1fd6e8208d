"""Shards of a latent store: safetensors files whose tensors have one row an entry, read row by row."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import naming, replace
from longtake.small_files import parse_json

_MAPPED = 128  # shards that a process keeps mapped
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
_LETTERS = {dtype: letters for letters, dtype in _DTYPES.items()}
MEND = "`longtake data encode RUN -o FOLDER --mend` makes again what is damaged"


class DamagedShard(Exception):
    """Bytes of a shard are not those that were written."""


def shard_path(folder: Path, kind: str, number: int) -> Path:
    """The file of a shard of `kind` ("latents" or "texts")."""
    return folder / kind / f"{number:06d}.safetensors"


def crc_of(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over the bytes of an entry's tensors, by name."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(_bytes_of(tensors[name]), crc)
    return crc


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file that is whole or absent, and on disk when this returns. Raises OSError.

    The library's own writer gives files to their owner alone, whatever the umask says; the bytes here are the same.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _LETTERS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(_bytes_of(tensor))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name, bytes on disk, when the body ends well; else nothing of it stays.

    Until then it has another name, and this process holds a lock on it, by which `remove_abandoned` knows that its
    writer lives. Raises OSError.
    """
    partial, file = _open_partial(path)
    try:
        with naming(path, partial), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Removes files whose writers have ended; on a file system without locks, none."""
    for partial in folder.glob(".*.partial"):
        with suppress(OSError), open(partial, "r+b") as file:  # network file systems lock what is open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()


def _open_partial(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        file = open(partial, "xb")  # noqa: SIM115 - closed by `whole_file`
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if partial.exists():  # and was not taken for abandoned before it was locked
            return partial, file
        file.close()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small file. Raises `UserError` where it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {MEND}") from error


@dataclass(frozen=True)
class _TensorRows:
    """Where the rows of one tensor lie in a shard's file."""

    start: int
    row_bytes: int
    num_rows: int
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype


class LatentShards:
    """The shards of a store, mapped into memory when first read; the least recently used are let go."""

    def __init__(self, folder: Path, tensors: Mapping[str, Mapping[str, Any]] | None = None):
        """`tensors`: kind -> name -> {"dtype", "shape"}, of what shards must hold; None: whatever it is."""
        self.folder, self.tensors = folder, tensors or {}
        self._open: OrderedDict[tuple[str, int], tuple[np.memmap, dict[str, _TensorRows]]] = OrderedDict()

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
            size, places = path.stat().st_size, self._header(path, kind)
        except (OSError, DamagedShard) as error:
            return f"{kind}/{number:06d}.safetensors cannot be read ({error})"
        if any(place.start + place.row_bytes * place.num_rows > size for place in places.values()):
            return f"{kind}/{number:06d}.safetensors is cut short"
        if any(place.num_rows != num_rows for place in places.values()):
            return f"{kind}/{number:06d}.safetensors has not the {num_rows} rows that the index names"
        return None

    def _mapped(self, kind: str, number: int) -> tuple[np.memmap, dict[str, _TensorRows]]:
        key = kind, number
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = shard_path(self.folder, kind, number)
        try:
            found = np.memmap(path, np.uint8, mode="r"), self._header(path, kind)
        except (OSError, ValueError, DamagedShard) as error:
            raise DamagedShard(f"{kind}/{number:06d}.safetensors cannot be read ({error})") from error
        self._open[key] = found
        if len(self._open) > _MAPPED:
            self._open.popitem(last=False)
        return found

    def _header(self, path: Path, kind: str) -> dict[str, _TensorRows]:
        places = read_header(path)
        for name, entry in self.tensors.get(kind, {}).items():
            wanted = getattr(torch, entry["dtype"]), len(entry["shape"])
            if name not in places or (places[name].dtype, len(places[name].shape)) != wanted:
                raise DamagedShard(f"its {name!r} is not what the store holds")
        return places


def read_header(path: Path) -> dict[str, _TensorRows]:
    """Where the tensors of a safetensors file lie. Raises OSError, and `DamagedShard` for another kind of file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise DamagedShard("no safetensors file")
        text = file.read(length)
    try:
        header = parse_json(text)
        return {name: _rows(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedShard("no safetensors file") from error


def _rows(entry: Mapping, data_start: int) -> _TensorRows:
    begin, end = entry["data_offsets"]
    num_rows, *shape = entry["shape"]
    row_bytes, dtype = (end - begin) // num_rows, _DTYPES[entry["dtype"]]
    if begin < 0 or row_bytes * num_rows != end - begin or row_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError("offsets and shape do not fit")
    return _TensorRows(data_start + begin, row_bytes, num_rows, tuple(shape), dtype)
