"""Tensors of files that `torch.save` has written (.pt, .pth, .bin), mapped into memory; no code in them is run.

`torch.load(weights_only=True)` may call functions such as `bytearray` with any size that the file states. Here only
tensors are made, over bytes that the file has; every other object stays a description of itself (`PickledCall`).
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from longtake.plain_pickle import Global, MalformedPickle, PickledCall, read_pickle
from longtake.small_files import regular

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: lengths of its name and of its extra field
_MAX_DIMS = 16


class MalformedFile(MalformedPickle):
    """A file that `torch.save` has not written, or that states more than it holds."""


@dataclass(frozen=True)
class _Storage:
    """Contiguous numbers in a file."""

    dtype: torch.dtype
    view: memoryview


def load_torch_file(path: Path, mapped: bool = True) -> Any:
    """Return the tensors, numbers and texts in a file, in dicts, lists and tuples; a `PickledCall` for any other
    object.

    `mapped`: numbers are read when they are used. Raises OSError; `MalformedFile` for a file that `torch.save` has not
    written, and for one that states sizes beyond its bytes.
    """
    with regular(path).open("rb") as file:
        return load_torch_part(file, mapped=mapped)


def load_torch_part(file: BinaryIO, start: int = 0, length: int | None = None, mapped: bool = True) -> Any:
    """Return the same of a part of an open file."""
    size = file.seek(0, 2)
    length = size - start if length is None else length
    if start < 0 or length <= 0 or start + length > size:
        raise MalformedFile("it is empty, or shorter than stated")
    if mapped:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[start : start + length]
    else:
        file.seek(start)
        view = memoryview(bytearray(file.read(length)))
    try:
        return _load_zip(view) if bytes(view[:4]) == _ZIP_SIGNATURE else _load_legacy(view)
    except (MalformedPickle, zipfile.BadZipFile, NotImplementedError) as error:
        raise MalformedFile(str(error)) from None


class _View:
    """Bytes as a stream whose reads allocate no more than there is."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.place = view, 0

    def read(self, size: int = -1, /) -> bytes:
        end = len(self.view) if size < 0 else self.place + size
        part = bytes(self.view[self.place : end])
        self.place += len(part)
        return part

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and (part := self.read(256)):
            end = part.find(b"\n") + 1 or len(part)
            self.place -= len(part) - end
            line += part[:end]
        return bytes(line)

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = max(0, offset + (0, self.place, len(self.view))[whence])
        return self.place

    def seekable(self) -> bool:
        return True


def _load_zip(view: memoryview) -> Any:
    records = _records(view)
    pickles = [name for name in records if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(pickles) != 1:
        raise MalformedFile(f"it holds {len(pickles)} records data.pkl, expected one")
    folder = pickles[0].removesuffix("data.pkl")
    if bytes(records.get(f"{folder}byteorder", b"little")) != b"little":
        raise MalformedFile("its numbers are not little-endian")
    return _read(records[pickles[0]], lambda name: records.get(f"{folder}data/{name}"))


def _records(view: memoryview) -> dict[str, memoryview]:
    """Return the records of a zip file by name. Raises `MalformedFile` for one that is compressed or lies outside the
    file."""
    records = {}
    with zipfile.ZipFile(_View(view)) as archive:  # type: ignore[arg-type]
        for info in archive.infolist():
            name, start = info.filename, info.header_offset + _LOCAL_HEADER.size
            header = view[max(0, info.header_offset) : start]
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise MalformedFile(f"its record {name[:40]!r} is compressed, which torch.save does not do")
            if len(header) == _LOCAL_HEADER.size and header[:4] == _ZIP_SIGNATURE:
                start += sum(_LOCAL_HEADER.unpack(header))
                records[name] = view[start : start + info.file_size]
            if len(records.get(name, b"")) != info.file_size:
                raise MalformedFile(f"its record {name[:40]!r} lies outside the file")
    return records


def _load_legacy(view: memoryview) -> Any:
    """Return the form of before PyTorch 1.6: five pickles, then each storage behind its length."""
    stream = _View(view)
    if read_pickle(stream) != _LEGACY_MAGIC:
        raise MalformedFile("torch.save has not written it")
    for _ in ("protocol", "system"):
        read_pickle(stream)
    start, item_bytes = stream.tell(), dict[str, int]()

    def note(key: Any) -> None:
        dtype, name, _ = _storage_key(key)
        item_bytes[name] = dtype.itemsize

    read_pickle(stream, stored=note)
    end, places = stream.tell(), dict[str, memoryview]()
    for name in read_pickle(stream):
        if name not in item_bytes:
            raise MalformedFile("its list of storages names others than its tensors do")
        length = int.from_bytes(stream.read(8), "little", signed=True) * item_bytes[name]
        places[name] = view[stream.tell() : stream.tell() + max(0, length)]
        if length != len(places[name]):
            raise MalformedFile(f"its storage {name[:40]!r} has fewer bytes than stated")
        stream.seek(length, 1)
    return _read(view[start:end], places.get)


def _read(pickled: memoryview, place_of: Callable[[str], memoryview | None]) -> Any:
    """Return the value of a pickle whose storages lie at these places."""

    def stored(key: Any) -> _Storage:
        dtype, name, count = _storage_key(key)
        place = place_of(name)
        if place is None or count * dtype.itemsize > len(place):
            raise MalformedFile(f"its storage {name[:40]!r} has fewer bytes than the {count:,} numbers stated")
        return _Storage(dtype, place[: count * dtype.itemsize])

    return read_pickle(_View(pickled), _make, stored)


def _storage_key(key: Any) -> tuple[torch.dtype, str, int]:
    """Dtype, name and count of numbers that a persistent id states."""
    match key:
        case ("storage", Global(name=kind), str(name), _, int(count), *_) if kind in _STORAGES and count >= 0:
            return _STORAGES[kind], name, count
    raise MalformedFile("it refers to a storage of an unknown kind")


def _make(function: Global, args: tuple[Any, ...]) -> Any:
    match str(function), args:
        case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor", (_Storage() as storage, *where):
            return _tensor(storage, storage.dtype, *where[:3])
        case "torch._utils._rebuild_tensor_v3", (_Storage() as storage, *where, Global(name=name)):
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise MalformedFile(f"a tensor has the unknown dtype {name[:40]!r}")
            return _tensor(storage, dtype, *where[:3])
        case "torch._utils._rebuild_parameter", (Tensor() as tensor, *_):
            return tensor
        case "torch._tensor._rebuild_from_type_v2", (Global() as inner, Global(), tuple(inner_args), *_):
            return _make(inner, inner_args) if inner.name.startswith("_rebuild_tensor") else PickledCall(function, args)
        case "torch.Size", (tuple(size),):
            return size
    return PickledCall(function, args)


def _tensor(storage: _Storage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> Tensor:
    """Return a tensor over a part of a storage. Raises `MalformedFile` for one with more numbers than the
    storage has."""
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or len(size) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in numbers):
        raise MalformedFile("a tensor has an impossible shape")
    count = len(storage.view) // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    if prod(size) > count or last >= count:
        raise MalformedFile(f"a tensor of the shape {list(size)} has more numbers than its storage, {count:,}")
    flat = torch.frombuffer(storage.view, dtype=torch.uint8, count=count * dtype.itemsize)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).as_strided(size, stride, offset)
