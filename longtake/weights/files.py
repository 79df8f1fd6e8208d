"""Files and folders of weights as one mapping of names to tensors, read when asked for; no code in them is ever run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longtake.chunks import chunked
from longtake.contracts import UserError, in_one_line
from longtake.durable import sync_file, unfinished, unfinished_folder, write_whole
from longtake.hub import find_files
from longtake.small_files import regular
from longtake.tensor_files import bytes_of, safetensors_head
from longtake.weights.format import STEM_OF_DIFFUSERS
from longtake.weights.pickles import SUFFIXES, PickledTensors
from longtake.weights.torch_folder import METADATA, TorchFolder

# What a folder of a denoiser on the hub may be: diffusers' pipeline, its transformer alone, or one exported here.
_FOLDERS = (
    ("model_index.json", "transformer/*.json", "transformer/*.safetensors"),
    ("config.json", "diffusion_pytorch_model*.json", "diffusion_pytorch_model*.safetensors"),
    ("config.json", "model.safetensors.index.json", "model*.safetensors"),
)
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_FILE = "model" + INDEX_SUFFIX
MOST_FILE_BYTES = 5 * 10**9  # of one file of a folder, as Hugging Face's libraries have it
_INDEX_OF_PICKLES = ".bin.index.json"
Head = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: dtype and shape


class TensorSource(Protocol):
    """Tensors by name, read when asked for, with their shapes known before: `WeightFiles`, or the like of it."""

    path: Path  # names them in a fault
    metadata: Mapping[str, str]

    def __getitem__(self, name: str) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of one safetensors file, or of a folder of them with or without a Hugging Face index; or of PyTorch's
    own files (`PickledTensors`), in a folder where there are no others.

    Opening reads headers only; `files[name]` reads one tensor onto the CPU. `shape(name)` and `metadata` need no data.
    `opened`: the files that are read, by name; a folder may hold those of other models and precisions too.
    `others`: name -> kind of what PyTorch's own files have among the tensors that is not one, and is never made.
    Raises `UserError` for a missing path, a damaged file, an index that names files or tensors that are not there, and
    a tensor name found in two files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.metadata: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self._files: dict[str, safe_open | PickledTensors] = {}  # tensor name -> open file
        index = _index_of(self.path)
        table = {} if index is None else _read_index(index)
        self.opened = sorted(_files_in(self.path) if index is None else _files_of_index(index, table))
        for file in self.opened:
            handle = _open(file)
            self.metadata.update(handle.metadata() or {})
            self.others.update(getattr(handle, "others", {}))
            for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in self._files:
                    raise UserError(
                        f"{file}: the tensor {name} is in another file of this folder too; keep one of them"
                    )
                self._files[name] = handle
        if lost := sorted(set(table) - set(self._files)):
            raise UserError(
                f"{index}: names {len(lost)} tensors that its files do not hold ({lost[0]} ...); copy the folder again"
            )

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._files[name].get_tensor(name)
        except SafetensorError as error:  # such as a dtype that PyTorch has not
            raise UserError(f"{self.path}: {name} cannot be read ({in_one_line(error)}); convert it again") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return tuple(self._files[name].get_slice(name).get_shape())


def open_source(path: str | os.PathLike[str]) -> TensorSource:
    """Return the denoiser's files at a path: those in it, or in the folder that diffusers and Open-Sora keep it in.

    A folder of a whole diffusers pipeline (`model_index.json`) has its denoiser in `transformer`; a checkpoint folder
    of Open-Sora in `model`. A folder of PyTorch's distributed checkpoint is read too. Raises `UserError` as
    `WeightFiles`.
    """
    folder = Path(path).expanduser()
    if (folder / METADATA).is_file():
        return TorchFolder(folder)
    if (folder / "model_index.json").is_file():
        return WeightFiles(folder / "transformer")
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and (folder / "model").is_dir():
        return WeightFiles(folder / "model")
    return WeightFiles(folder)


def find_denoiser(name: str, key: str = "model.from_pretrained") -> Path:
    """Return the local file or folder that a key such as `model.from_pretrained` stands for: a path, or a name on the
    Hugging Face hub.

    `owner/name` is a folder of diffusers or an export; `owner/name/file.safetensors` one file. Raises `UserError` as
    `find_files`.
    """
    return find_files(name, key, _FOLDERS)


def save_weights(
    state: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = MOST_FILE_BYTES,
    heads: Mapping[str, Head] | None = None,
    stem: str = "model",
    beside: Mapping[str, str] = MappingProxyType({}),
) -> list[Path]:
    """Write tensors as safetensors, in their own dtypes, and return the files written.

    A path ending in `.safetensors` becomes one file; any other a folder in Hugging Face's layout: `STEM.safetensors`,
    or, above `max_file_bytes`, `STEM-00001-of-0000N.safetensors` and an index, each file within the bound unless a
    single tensor exceeds it; and the texts of `beside`, by file name. File or folder appear only when they are whole.
    One tensor at a time is taken from `state`, and twice where no `heads` say before what dtype and shape it has.
    Raises `UserError` where something lies at `path` already; OSError.
    """
    path, header = Path(path).expanduser(), {"format": "pt", **(metadata or {})}
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path}: exists already and is not overwritten; choose another name")
    heads = heads or {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    needs = sum(map(_size, heads.values()))
    if path.suffix == ".safetensors":
        with unfinished(path, needs=needs) as partial:
            _write_file(partial, state, heads, header)
        return [path]
    with unfinished_folder(path, needs) as partial:
        dealt, every = chunked(list(map(_size, heads.values())), max_file_bytes), list(heads.items())
        shares = [dict(every[few.start : few.stop]) for few in dealt]
        numbers = [f"-{i:05d}-of-{len(shares):05d}" for i in range(1, len(shares) + 1)] if len(shares) > 1 else [""]
        names = [f"{stem}{number}.safetensors" for number in numbers]
        for name, share in zip(names, shares, strict=True):
            _write_file(partial / name, state, share, header)
            sync_file(partial / name)
        if len(names) > 1:
            index = {
                "metadata": {"total_size": needs},
                "weight_map": {tensor: name for name, share in zip(names, shares, strict=True) for tensor in share},
            }
            write_whole(partial / (stem + INDEX_SUFFIX), json.dumps(index, indent=1) + "\n")
        for name, text in beside.items():
            write_whole(partial / name, text)
    return [path / name for name in names]


def _write_file(path: Path, state: Mapping[str, Tensor], heads: Mapping[str, Head], header: dict[str, str]) -> None:
    names = sorted(heads, key=lambda name: (-heads[name][0].itemsize, name))  # aligned without holes
    with path.open("wb") as stream:
        stream.write(safetensors_head([(name, *heads[name]) for name in names], header))
        for name in names:
            stream.write(memoryview(bytes_of(state[name].detach().cpu()).numpy()))


def _size(head: Head) -> int:
    dtype, shape = head
    return prod(shape) * dtype.itemsize


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a .safetensors file or a folder that holds some")
    if (usual := path / f"{STEM_OF_DIFFUSERS}.safetensors").is_file():  # beside which there may be other precisions
        return [usual]
    kinds = ("*.safetensors", "pytorch_model*.bin", "mp_rank_*_model_states.pt")  # the last is DeepSpeed's, and SAT's
    files = next((found for kind in kinds if (found := sorted(path.glob(kind)))), [])
    if not files:
        raise UserError(f"{path}: holds no .safetensors file; give a .safetensors file or a folder that holds some")
    return files


def _index_of(path: Path) -> Path | None:
    if path.name.endswith((INDEX_SUFFIX, _INDEX_OF_PICKLES)) and path.is_file():
        return path
    kind = INDEX_SUFFIX if any(path.glob("*.safetensors*")) else _INDEX_OF_PICKLES
    found = sorted(path.glob("*" + kind)) if path.is_dir() else []
    if len(found) > 1:
        raise UserError(f"{path}: holds {len(found)} indices ({found[0].name}, {found[1].name}); name the one to read")
    return found[0] if found else None


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index}: is no index of weights; it must be JSON with a table `weight_map`") from None


def _files_of_index(index: Path, table: Mapping[str, str]) -> list[Path]:
    files = []
    for name in sorted(set(table.values())):
        file = index.parent / name
        if Path(name).name != name:
            raise UserError(f"{index}: names the file {name!r} outside its own folder; it must name files beside it")
        if not file.is_file():
            raise UserError(f"{index}: names {name}, which is not there; copy the missing file into {index.parent}")
        files.append(file)
    return files


def _open(file: Path) -> safe_open | PickledTensors:
    if file.suffix in SUFFIXES:
        return PickledTensors(file)
    try:
        return safe_open(regular(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as fault:
        raise UserError(f"{file}: cannot be read as safetensors ({fault}); copy or convert it again") from None
