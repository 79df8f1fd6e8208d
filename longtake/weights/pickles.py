"""Tensors in PyTorch's own files (.pt, .pth, .bin): read by its unpickler of plain tensors, which runs no code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from longtake.contracts import UserError, in_one_line
from longtake.small_files import regular

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_WRAPPERS = ("state_dict", "model", "module")  # keys under which programs keep the tensors, beside other things


def load_plain(file: Path) -> Any:
    """The tensors, numbers and texts of such a file, in dicts and lists, and `_PassedOver` for anything else; mapped
    into memory where the file allows it. Raises `UserError`."""
    try:
        zipped = is_zipfile(regular(file))
        others = get_unsafe_globals_in_checkpoint(file) if zipped else []
        with safe_globals([(_PassedOver, name) for name in others]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # whatever the unpickler meets in a file that is none
        raise UserError(
            f"{file}: cannot be read as plain tensors, and code in it is not run ({_reason(error)}); save what you "
            "need of it as .safetensors, by the program that wrote it"
        ) from None


class PickledTensors:
    """The tensors of such a file by name, with the methods of `safe_open`; mapped into memory where the file allows it.

    Of a checkpoint that holds more than tensors, those under `state_dict` and the like are taken; what only code would
    make, such as a program's arguments, is passed over. Raises `UserError` for a file that is none, for one that wants
    more of such objects than that they are there, or has some in PyTorch's old form, and for one without named tensors.
    """

    def __init__(self, file: Path) -> None:
        self._tensors = _named(load_plain(file))
        if not self._tensors:
            raise UserError(f"{file}: holds no tensors by name; give a file of a model's weights")

    def metadata(self) -> dict[str, str]:
        return {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> PickledTensors.Slice:
        return self.Slice(self._tensors[name])

    class Slice:
        """What of a tensor's data is not read for."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)


class _PassedOver:
    """Stands for whatever is no tensor, and does nothing of what the file asks for."""

    def __new__(cls, *arguments: object, **named: object) -> _PassedOver:
        return super().__new__(cls)

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _reason(error: Exception) -> str:
    """What of an error is about the file: not the advice around it, nor its colours."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rpartition("WeightsUnpickler error: ")[2].strip()
    return in_one_line(ValueError(re.split(r"\.?\s*\n|\. ", said)[0]))


def _named(found: object) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        return {}
    own = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
    return own if own or inner is None else _named(inner)
