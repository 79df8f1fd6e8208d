"""Folders of PyTorch's distributed checkpoint, as other programs write them, read without running anything in them.

Such a folder has a pickle, `.metadata`, and files in which tensors lie one behind another as `torch.save` writes them.
Nothing that the pickle states is believed: chunks must tile their tensor, their bytes must be in the files and must not
be shared, and what is read must have the size and dtype stated.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise, product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError, in_one_line
from longtake.durable import unfinished_folder, write_whole
from longtake.plain_pickle import Global, MalformedPickle, PickledCall, read_pickle
from longtake.small_files import read_small, regular
from longtake.torch_files import load_torch_part

METADATA = ".metadata"
_DATA = "__0_0.distcp"
_IN_CHECKPOINT = "torch.distributed.checkpoint"
_MAX_DIMS = 8
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        *(
            (f"{_IN_CHECKPOINT}.metadata", name)
            for name in (
                *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
                *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            )
        ),
        (f"{_IN_CHECKPOINT}.filesystem", "_StorageInfo"),
        *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    }
)
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class _ByteRange:
    """Bytes of a chunk."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor in the files: its chunks and where each one is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, _ByteRange]


class TorchFolder(Mapping[str, Tensor]):
    """The tensors of a folder of PyTorch's distributed checkpoint, each read whole when it is asked for.

    Of a training run's, where a model lies beside an optimizer, those of the model, without the `model.` in front.
    Raises `UserError` for a folder that is damaged, or states anything but tensors and their places.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.metadata: Mapping[str, str] = {}
        described, places = self._read_metadata()
        of_model = [name for name in described if name.startswith("model.")]
        self._tensors = {
            name.removeprefix("model."): self._stored(name, described, places) for name in of_model or described
        }
        self._check_places()

    def _read_metadata(
        self,
    ) -> tuple[dict[str, Mapping[str, Any]], dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]]:
        """Facts of each tensor by name, and of the place of each chunk by tensor and offsets."""
        file = self.path / METADATA
        try:
            content = _state(read_pickle(BytesIO(read_small(file)), _make, check=_refuse_others))
            tensors = {
                str(name): _state(one)
                for name, one in content["state_dict_metadata"].items()
                if one.function.name == "TensorStorageMetadata"
            }
            keys = [(_state(key), _state(place)) for key, place in content["storage_data"].items()]
            return tensors, {(str(key["fqn"]), _numbers(key.get("offset") or ())): place for key, place in keys}
        except _NotAllowed as error:
            raise UserError(
                f"{file}: is not read, for it names {error}, which has nothing to do with tensors; give a folder that "
                "torch.distributed.checkpoint has written"
            ) from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); copy the folder again") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: cannot be read ({in_one_line(error)}); copy the folder again") from None

    def _stored(self, name: str, described: Mapping[str, Mapping[str, Any]], places: Mapping[Any, Any]) -> _Stored:
        """Return a tensor whose chunks tile it. Raises `UserError` for any other."""
        try:
            one = described[name]
            shape, dtype = _numbers(one["size"]), _dtype(one["properties"])
            boxes = [(_numbers(_state(chunk)["offsets"]), _numbers(_state(chunk)["sizes"])) for chunk in one["chunks"]]
            if len(shape) > _MAX_DIMS or not tiles(shape, boxes):
                raise ValueError("its chunks overlap or leave gaps")
            found = {}
            for box in boxes:
                place = places.get((name, box[0])) or (places.get((name, ())) if len(boxes) == 1 else None)
                if place is None:
                    raise ValueError("a chunk has no place in the files")
                found[box] = _place(place)
            return _Stored(shape, dtype, found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path / METADATA}: does not describe {name} ({in_one_line(error)}); copy the folder again"
            ) from None

    def _check_places(self) -> None:
        """Raise `UserError` where bytes of chunks are not in the files, or two chunks share some."""
        by_file: dict[str, list[_ByteRange]] = {}
        for stored in self._tensors.values():
            for place in stored.chunks.values():
                by_file.setdefault(place.file, []).append(place)
        for name, places in by_file.items():
            file = self.path / name
            try:
                size = regular(file).stat().st_size
            except OSError:
                raise UserError(f"{self.path}: lacks {name}, in which tensors are; copy the folder again") from None
            places.sort(key=lambda place: place.start)
            if places[-1].start + places[-1].length > size:
                raise UserError(f"{file}: has {size:,} bytes, and {METADATA} states more; copy the folder again")
            if any(one.start + one.length > other.start for one, other in pairwise(places)):
                raise UserError(f"{file}: two chunks of {METADATA} share bytes; copy the folder again")

    def __getitem__(self, name: str) -> Tensor:
        stored = self._tensors[name]
        parts = [(box, self._chunk(name, box, place)) for box, place in stored.chunks.items()]
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for (offsets, sizes), part in parts:
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = part
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the metadata."""
        return self._tensors[name].shape

    def _chunk(self, name: str, box: Box, place: _ByteRange) -> Tensor:
        file, dtype = self.path / place.file, self._tensors[name].dtype
        try:
            with file.open("rb") as stream:
                found = load_torch_part(stream, place.start, place.length, mapped=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: {name} cannot be read ({in_one_line(error)}); copy it again") from None
        if not isinstance(found, Tensor) or tuple(found.shape) != box[1] or found.dtype != dtype:
            raise UserError(
                f"{file}: {name} is not of the size and dtype that {METADATA} states; copy the folder again"
            )
        return found


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Return True where boxes fill a shape without overlap.

    Their volumes add up to that of the shape, and corners that are met an odd number of times are the shape's own: then
    an odd number of boxes, thus at least one, is at every point, and no point is left for a second.
    """
    volume, corners = 0, Counter[tuple[int, ...]]()
    for offsets, sizes in boxes:
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        if len(offsets) != len(shape) or any(end > limit for end, limit in zip(ends, shape, strict=True)):
            return False
        if prod(sizes):
            volume += prod(sizes)
            corners.update(product(*zip(offsets, ends, strict=True)))
    odd = {corner for corner, count in corners.items() if count % 2}
    own = set(product(*((0, size) for size in shape))) if prod(shape) else set()
    return volume == prod(shape) and odd == own


class _NotAllowed(MalformedPickle):
    """A name in a pickle that has nothing to do with tensors."""


def _refuse_others(name: Global) -> None:
    if name not in _ALLOWED and not (
        name.module == "torch" and isinstance(getattr(torch, name.name, None), torch.dtype)
    ):
        raise _NotAllowed(str(name))


def _make(function: Global, args: tuple[Any, ...]) -> Any:
    is_size = function == ("torch", "Size") and len(args) == 1 and isinstance(args[0], tuple)
    return args[0] if is_size else PickledCall(function, args)


def _state(value: Any) -> Mapping[str, Any]:
    """Return the fields of an object. Raises TypeError for anything else."""
    if not isinstance(value, PickledCall) or not isinstance(value.state, dict):
        raise TypeError(f"expected an object with fields, got {type(value).__name__}")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise TypeError(f"expected whole numbers, got {type(value).__name__}")
    return tuple(value)


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state
    name = state.get("dtype") if isinstance(state, dict) else state[0]
    dtype = getattr(torch, name.name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError("expected a dtype")
    return dtype


def _place(state: Mapping[str, Any]) -> _ByteRange:
    file, start, length = state["relative_path"], state["offset"], state["length"]
    if not isinstance(file, str) or Path(file).name != file or state.get("transform_descriptors"):
        raise ValueError("a chunk is not in a file beside it")
    _numbers((start, length))
    return _ByteRange(file, start, length)


def save_torch_folder(
    state: Mapping[str, Tensor], folder: Path, prefix: str = "", beside: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write tensors, one at a time, as a folder that `torch.distributed.checkpoint.load` reads, behind `prefix`; and
    the texts of `beside`, by file name. The folder appears when it is whole. Raises `UserError` where there is one."""
    from torch.distributed.checkpoint import metadata as described
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = folder.expanduser()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not overwritten; choose another name")
    tensors: dict[str, Any] = {}
    places = {}
    with unfinished_folder(folder) as partial:
        with (partial / _DATA).open("wb") as stream:
            for name in state:
                value, start = state[name].detach().cpu().contiguous().clone(), stream.tell()
                torch.save(value, stream)
                origin = torch.Size([0] * value.dim())
                tensors[prefix + name] = described.TensorStorageMetadata(
                    described.TensorProperties(value.dtype),
                    value.size(),
                    [described.ChunkStorageMetadata(origin, value.size())],
                )
                index = described.MetadataIndex(prefix + name, origin, 0)
                places[index] = _StorageInfo(_DATA, start, stream.tell() - start)
        with (partial / METADATA).open("wb") as stream:
            pickle.dump(described.Metadata(tensors, None, places), stream)
        for name, text in beside.items():
            write_whole(partial / name, text)
