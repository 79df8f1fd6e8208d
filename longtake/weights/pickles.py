"""Tensors by name in PyTorch's own files (.pt, .pth, .bin); no code in them is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from longtake.contracts import UserError, in_one_line
from longtake.plain_pickle import PickledCall
from longtake.torch_files import load_torch_file

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_WRAPPERS = ("state_dict", "model", "module")  # keys under which programs keep the tensors, beside other things
_MAX_DEPTH = 4  # of such keys in each other


def load_plain(file: Path) -> Any:
    """Return the tensors, numbers and texts of such a file, in dicts and lists, and a `PickledCall` for anything
    else; mapped into memory. Raises `UserError`."""
    try:
        return load_torch_file(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read as plain tensors, and code in it is not run ({in_one_line(error)}); save what you "
            "need of it as .safetensors, by the program that wrote it"
        ) from None


class PickledTensors:
    """The tensors of such a file by name, with the methods of `safe_open`; mapped into memory where the file allows it.

    Of a checkpoint that holds more than tensors, those under `state_dict` and the like are taken; what only code would
    make, such as a program's arguments, is passed over. `others`: what the dict of the tensors has that is not one, by
    name. Raises `UserError` for a file that is none, for one that states
    more than it holds, and for one without named tensors.
    """

    def __init__(self, file: Path) -> None:
        self._tensors, self.others = _named(load_plain(file))
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
        """Shape of a tensor, without reading its data."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)


def _named(found: object, depth: int = 0) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the dict that holds them, and the kinds of the other values there."""
    if not isinstance(found, Mapping) or depth == _MAX_DEPTH:
        return {}, {}
    own = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
    if not own and inner is not None:
        return _named(inner, depth + 1)
    return own, {str(name): _kind(value) for name, value in found.items() if name not in own}


def _kind(value: object) -> str:
    return str(value.function) if isinstance(value, PickledCall) else type(value).__name__
