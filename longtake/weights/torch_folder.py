"""Folders of PyTorch's distributed checkpoint, as other programs write them, read without running anything in them.

Such a folder has a pickle, `.metadata`, and files in which tensors lie one behind another as `torch.save` writes them.
The pickle is read with stand-ins for the few classes that it may name; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import unfinished_folder, write_whole
from longtake.small_files import regular

METADATA = ".metadata"
_DATA = "__0_0.distcp"
_IN_CHECKPOINT = "torch.distributed.checkpoint"


class _StandIn:
    """Whatever a class that is not built was given."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _StandIn,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    **{
        (f"{_IN_CHECKPOINT}.metadata", name): _StandIn
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    },
    (f"{_IN_CHECKPOINT}.filesystem", "_StorageInfo"): _StandIn,
    **{(module, f"{kind}Path"): _StandIn for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
}


class _NotAllowed(Exception):
    """A name in a pickle that its reader has nothing for."""


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise _NotAllowed(f"{module}.{name}")


class TorchFolder(Mapping[str, Tensor]):
    """The tensors of a folder of PyTorch's distributed checkpoint, each read whole when it is asked for.

    Of a training run's, where a model lies beside an optimizer, those of the model, without the `model.` in front.
    Raises `UserError` for a folder that is damaged, or names anything but tensors' places.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.metadata: Mapping[str, str] = {}
        read = self._read_metadata()
        try:
            tensors = {name: one for name, one in read.state_dict_metadata.items() if hasattr(one, "chunks")}
            of_model = [name for name in tensors if name.startswith("model.")]
            self._names = {name.removeprefix("model."): name for name in of_model or tensors}
            self._tensors = {own: tensors[name] for own, name in self._names.items()}
            self._places = {
                (key.fqn, tuple(getattr(key, "offset", None) or ())): place for key, place in read.storage_data.items()
            }
            self._shapes = {name: tuple(map(int, one.size)) for name, one in self._tensors.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{folder / METADATA}: is of another form ({error}); copy the folder again") from None

    def _read_metadata(self) -> Any:
        file = self.path / METADATA
        try:
            with regular(file).open("rb") as stream:
                return _MetadataReader(stream).load()
        except _NotAllowed as error:
            raise UserError(
                f"{file}: is not read, for it names {error}, which has nothing to do with tensors; give a folder that "
                "torch.distributed.checkpoint has written"
            ) from None
        except Exception as error:  # whatever an unpickler meets in a file that is none
            raise UserError(f"{file}: cannot be read ({type(error).__name__}); copy the folder again") from None

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensors[name].chunks]
        if len(chunks) == 1:
            return self._chunk(name, *chunks[0])
        parts = [(offsets, self._chunk(name, offsets, sizes)) for offsets, sizes in chunks]
        if not parts or sum(part.numel() for _, part in parts) != prod(shape):
            raise UserError(f"{self.path}: lacks a part of {name}; copy the folder again")
        whole = parts[0][1].new_empty(shape)
        for offsets, part in parts:
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the metadata."""
        return self._shapes[name]

    def _chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        stored = self._names[name]
        place = self._places.get((stored, offsets), self._places.get((stored, ())))
        if (
            place is None
            or Path(file := place.relative_path).name != file
            or getattr(place, "transform_descriptors", None)
        ):
            raise UserError(f"{self.path}: does not say where {name} lies in its files; copy the folder again")
        try:
            with regular(self.path / file).open("rb") as stream:
                stream.seek(place.offset)
                found = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"{self.path}: lacks {file}, which {name} lies in; copy the folder again") from None
        except Exception as error:  # whatever the unpickler of tensors meets
            raise UserError(
                f"{self.path / file}: {name} cannot be read ({type(error).__name__}); copy it again"
            ) from None
        if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
            raise UserError(
                f"{self.path / file}: {name} is not of the size that {METADATA} says; copy the folder again"
            )
        return found


def save_torch_folder(
    state: Mapping[str, Tensor], folder: Path, prefix: str = "", beside: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes tensors, one at a time, as a folder that `torch.distributed.checkpoint.load` reads, behind `prefix`; and
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
