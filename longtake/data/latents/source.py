"""Where latents and embedded captions come from when no encoder makes them: our stores, and files of other programs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import Caption, LatentShape, UserError, in_one_line
from longtake.data.tables.json_table import objects_of_lines
from longtake.small_files import regular
from longtake.torch_files import load_torch_file

_LINES_TRIED = 100  # whose tensors might tell the shapes of all
OF_VIDEO = ("mean", "std")  # the moments of a clip's latents

Line = Mapping[str, Any]  # of the list
Read = Callable[[Line, Callable[[str], Any]], Mapping[str, Tensor]]
# What readers meet in a line, or in a file that it names, which is not as they take it to be.
_OTHER_FORM = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError)
Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of one sample's tensor


def sized(tensors: Mapping[str, Any], latent: LatentShape, shape: tuple[int, int, int]) -> dict[str, Kind]:
    """Tensors described as `LatentSource.latent_tensors` says, for a sample of (T, H, W) pixels."""
    letters = dict(zip("CFhwT", (*latent(*shape), shape[0]), strict=True))
    return {
        name: (getattr(torch, one["dtype"]), tuple(letters.get(axis, axis) for axis in one["shape"]))
        for name, one in tensors.items()
    }


LARGEST_LATENT = 1e4  # in size; no autoencoder gives larger ones, but bytes of pixels and broken encoders do


def check_numbers(name: str, value: Any, largest: float = math.inf) -> None:
    """Raise `UnusableLatents`, which begins with `name`, for NaN, infinity and numbers larger in size than
    `largest`; only tensors of numbers with fractions are looked at."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return
    low, high = (bound.item() for bound in torch.aminmax(value.float() if value.dtype.itemsize < 4 else value))
    if not (math.isfinite(low) and math.isfinite(high)):
        count = int((~torch.isfinite(value)).sum())
        raise UnusableLatents(f"{name}: {count} of {value.numel()} numbers are NaN or infinite")
    if max(-low, high) > largest:
        raise UnusableLatents(f"{name}: numbers from {low:.3g} to {high:.3g}, expected at most {largest:g} in size")


def num_bytes(kinds: Iterable[Kind]) -> int:
    """Bytes of such tensors, together."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)


class UnusableLatents(Exception):
    """What a source holds of one clip cannot be used: the reason, for the clip's line in the quarantine."""


@dataclass(frozen=True)
class EncoderFacts:
    """What a run needs to know of encoders that it does not hold."""

    latent: LatentShape
    text_length: int  # tokens of an embedded caption
    empty: Mapping[str, Tensor]  # what stands for no text: "text" [1, L, Dt], "vector" [1, Dv]
    posterior: bool = False  # latents are drawn from a posterior


class LatentSource(Protocol):
    """Latents and embedded captions by (view, sample). Picklable: loader workers have one each."""

    @property
    def place(self) -> str:
        """As `dataset.latents` names it, for sentences."""

    @property
    def encoders(self) -> EncoderFacts:
        """The facts of the encoders that made it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of known places that it has latents for, encoded apart from their clips."""

    def windows(self, num_frames: int) -> Mapping[str, int]:
        """Name -> latent frames of the windows that are encoded apart from clips of `num_frames` frames."""

    def latent_tensors(self, num_frames: int, windows: Sequence[str]) -> Mapping[str, Any]:
        """Name -> {"dtype", "shape"} of what `latents` gives of such a clip, as far as a batch needs it.

        Shapes in letters: C F h w of the latents, T frames of the clip. `mean`, and `std` for a random posterior.
        """

    def text_tensors(self) -> Mapping[str, Any]:
        """Return the same of one embedded caption: conditions, and their masks."""

    def find(self, view: int, samples: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the entries of samples (uint64 [B]) of rows of the clip table: int64 [B], -1 where there is none."""

    def latents(self, entry: int) -> Mapping[str, Tensor]:
        """Of one entry, on the CPU. Raises `UnusableLatents`."""

    def texts(self, entry: int, caption: Caption) -> Mapping[str, Tensor]:
        """Return the embedded caption of an entry; of several they are stacked. Raises `UnusableLatents`, and
        `ValueError` where the caption is known to be another than the one encoded."""


@dataclass(frozen=True)
class FileOf:
    """A `Read` of the file that a line names under a key, whose tensors are what is read."""

    key: str

    def __call__(self, line: Line, load: Callable[[str], Any]) -> Mapping[str, Tensor]:
        return dict(load(line[self.key]))


@dataclass(frozen=True)
class ListedLatents:
    """A `LatentSource` whose tensors lie in files of their own, one view of each clip.

    read_latents, read_texts: a line of the list, and what loads a file that it names, -> tensors; a family knows how
    that program laid them out. Both may raise `UnusableLatents`, and `KeyError` for what a line lacks. Functions of a
    module, so that they can be sent to loader workers.
    """

    path: Path  # of the list, in whose folder relative names start
    lines: Sequence[Line | None]  # of each row of the clip table; None: it is not listed
    encoders: EncoderFacts
    of_latents: Mapping[str, Any]  # name -> {"dtype", "shape"}
    of_texts: Mapping[str, Any]
    read_latents: Read
    read_texts: Read

    kinds: ClassVar[tuple[str, ...]] = ()  # nothing is encoded apart

    @property
    def place(self) -> str:
        return str(self.path)

    def windows(self, num_frames: int) -> Mapping[str, int]:
        return {}

    def latent_tensors(self, num_frames: int, windows: Sequence[str]) -> Mapping[str, Any]:
        return self.of_latents

    def text_tensors(self) -> Mapping[str, Any]:
        return self.of_texts

    def find(self, view: int, samples: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the rows themselves, in the one view that there is."""
        there = [view == 0 and self.lines[row] is not None for row in rows.tolist()]
        return np.where(np.array(there, bool), rows, -1)

    def latents(self, entry: int) -> Mapping[str, Tensor]:
        return self._read(self.read_latents, entry)

    def texts(self, entry: int, caption: Caption) -> Mapping[str, Tensor]:
        """As `read_texts` makes them; which caption it was, the files do not say."""
        return self._read(self.read_texts, entry)

    def _read(self, read: Read, entry: int) -> Mapping[str, Tensor]:
        line = self.lines[entry]
        assert line is not None
        try:
            return read(line, lambda name: _checked(name, load_tensors(self.path.parent / name)))
        except _OTHER_FORM as error:
            raise UnusableLatents(f"{self.path.name}: its line is of another form ({in_one_line(error)})") from error


def _checked(name: str, loaded: Any) -> Any:
    """Content of a file. Raises `UnusableLatents` that names the file where numbers are NaN or infinite."""
    for value in loaded.values() if isinstance(loaded, Mapping) else (loaded,):
        check_numbers(Path(name).name, value)
    return loaded


def open_listed(
    path: Path,
    key: str,
    names: Sequence[str],
    encoders: EncoderFacts,
    read_latents: Read,
    read_texts: Read,
    segments: bool = False,
) -> ListedLatents:
    """Return the source that a JSONL names. names: of the clips' files, in order of rows; `key` holds one in each line.

    Dtypes and shapes are those of the first line whose files can be read. `segments`: of texts the first axis counts a
    clip's captions. Raises `UserError` where there is no such line.
    """
    listed = ListedLatents(path, read_list(path, key, names), encoders, {}, {}, read_latents, read_texts)
    why = "names no clip of the table"
    for row in islice((row for row, line in enumerate(listed.lines) if line is not None), _LINES_TRIED):
        try:
            latents, texts = listed.latents(row), listed.texts(row, "")
        except UnusableLatents as error:
            why = f"none of its first lines can be read ({error})"
            continue
        for name, value in latents.items():
            if not value.is_floating_point():
                raise UserError(
                    f"{path}: line of {names[row]}: {name!r} is of {_name_of(value)}, expected latents of float16, "
                    "bfloat16, float32 or float64; write the autoencoder's output, not bytes or codes"
                )
        of_texts = {name: _described(value, value.shape[1 if segments else 0 :]) for name, value in texts.items()}
        return replace(listed, of_latents={n: _described(v, "CFhw") for n, v in latents.items()}, of_texts=of_texts)
    raise UserError(f"{path}: {why}; check dataset.latents")


def _described(value: Tensor, shape: Iterable[Any]) -> dict[str, Any]:
    return {"dtype": _name_of(value), "shape": list(shape)}


def _name_of(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def read_list(path: str | os.PathLike[str], key: str, names: Sequence[str]) -> list[Line | None]:
    """Return the lines of a JSONL whose `key` is one of `names`. Raises `UserError` for another file,
    repeated names."""
    lines: dict[str, Line] = {}
    try:
        for line in objects_of_lines(Path(path)):
            name = line.get(key)
            if not isinstance(name, str) or name in lines:
                why = "occurs twice" if isinstance(name, str) else "is not text"
                raise UserError(f"{path}: {key} = {str(name)[:80]!r} {why}; each line must name a clip of its own")
            lines[name] = line
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check dataset.latents") from error
    return [lines.get(name) for name in names]


def load_tensors(path: Path, mapped: bool = False) -> Any:
    """Return the tensors of a `.safetensors` file by name, or the value in a file of `torch.save`: no code is run.
    mapped: their numbers are not read before they are used, where the file's form allows it. Raises `UnusableLatents`.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(regular(path))
        return load_torch_file(path, mapped)
    except FileNotFoundError as error:
        raise UnusableLatents(f"{path.name}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise UnusableLatents(f"{path.name}: cannot be read ({in_one_line(error)})") from error
    except ValueError as error:
        raise UnusableLatents(f"{path.name}: cannot be read as plain tensors ({in_one_line(error)})") from error


def load_tensor(path: Path, mapped: bool = False) -> Tensor:
    """Return the tensor of a file that holds one, by whatever name. Raises `UnusableLatents`."""
    value = load_tensors(path, mapped)
    return single_tensor(path, value)


def single_tensor(path: str | os.PathLike[str], value: Any) -> Tensor:
    """Return the tensor in what `load_tensors` gave of a file. Raises `UnusableLatents` unless it is exactly one."""
    if isinstance(value, Mapping) and len(value) == 1:
        (value,) = value.values()
    if isinstance(value, Tensor):
        return value
    count = f"{len(value)} tensors" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    raise UnusableLatents(f"{Path(path).name}: holds {count}, expected one tensor")
