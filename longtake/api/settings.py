"""Keys and values from Python as the flags of a command line, which every reader of a run takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.config.overrides import NAME
from longtake.contracts import UserError


def flags_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags for dotted keys and their values: `{"optim.lr": 1e-4}` becomes `("--optim.lr=0.0001",)`.

    Values are None, booleans, numbers, text, paths, and lists, tuples and dicts of these. Raises `UserError` for
    another type, and for a key that is not text.
    """
    flags = []
    for key, value in values.items():
        if not isinstance(key, str) or NAME.fullmatch(f"--{key}={_text_of(key, value)}") is None:
            raise UserError(f'{key!r}: expected a dotted key; write for example "optim.lr"')
        flags.append(f"--{key}={_text_of(key, value)}")
    return tuple(flags)


def _text_of(key: str, value: Any) -> str:
    return repr(_plain(key, value))


def _plain(key: str, value: Any) -> Any:
    """Return the value with paths as text. Raises `UserError` for a type that no run file can have."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(key, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(key, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    raise UserError(
        f"{key} = a {type(value).__name__}: expected None, a boolean, a number, text, a path, or a list, tuple or dict "
        "of these; convert it first"
    )
