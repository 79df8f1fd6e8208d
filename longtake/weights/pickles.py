"""Tensors in PyTorch's own files (.pt, .pth, .bin): read by its unpickler of plain tensors, which runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from longtake.contracts import UserError, in_one_line
from longtake.small_files import regular

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_WRAPPERS = ("state_dict", "model", "module")  # keys under which programs keep the tensors, beside other things


class PickledTensors:
    """The tensors of such a file by name, with the methods of `safe_open`; mapped into memory where the file allows it.

    Of a checkpoint that holds more than tensors, those under `state_dict` and the like are taken. Raises `UserError`
    for a file with anything that only running code would make, and for one without named tensors.
    """

    def __init__(self, file: Path) -> None:
        try:
            found = torch.load(regular(file), map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        except Exception as error:  # whatever the unpickler meets in a file that is none
            raise UserError(
                f"{file}: cannot be read as plain tensors, and code in it is not run ({in_one_line(error)}); convert "
                "it to .safetensors where you trust it"
            ) from None
        self._tensors = _named(found)
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


def _named(found: object) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        return {}
    own = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
    return own if own or inner is None else _named(inner)
