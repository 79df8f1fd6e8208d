"""A configuration as a file that reads back to the same values."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from pydantic import BaseModel

from longtake.config.evaluator import MAX_LEVELS, scalar_fault
from longtake.config.faults import ConfigError, Fault, quote, shown
from longtake.config.tree import DELETE

WIDTH = 120
INDENT = "    "


def dump_config(value: BaseModel | Mapping[str, Any]) -> str:
    """Return the text of a Python-syntax file that `load_config` reads back to an equal value: one assignment for
    each key of a section, defaults included, or of plain data. Raises ConfigError for what a file cannot say, such
    as an object."""
    data = plain_data(value)
    lines: list[str] = []
    faults: list[Fault] = []
    for key, item in data.items():
        if not isinstance(key, str) or not is_name(key) or key.startswith("_"):
            faults.append(Fault("", shown(key), "cannot be the name of a key in a file", "choose another name"))
            continue
        try:
            lines.append(f"{key} = {literal(item, '', len(key) + 3)}\n")
        except ValueError as error:
            faults.append(Fault("", "", str(error), key=key))
    if faults:
        raise ConfigError(faults)
    return "".join(lines)


def plain_data(value: Any) -> Any:
    """Return a value with its sections as dicts."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, serialize_as_any=True)
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_data(item) for item in value)
    return value


def literal(value: Any, indent: str, column: int) -> str:
    """Return a value in the notation of a configuration file, broken over lines of 120 characters; `indent` stands
    before the line, `column` characters are on it already. Raises ValueError for what has no notation."""
    if value is None or isinstance(value, (bool, str, int, float)):
        return scalar(value)
    if isinstance(value, Mapping):
        if len({str(key) for key in value}) < len(value):
            raise ValueError("the same key stands as text and as a number")
        named = bool(value) and all(isinstance(key, str) and is_name(key) for key in value)
        opening, closing = ("dict(", ")") if named else ("{", "}")
        if wrong := [key for key in value if key == DELETE or isinstance(key, bool) or not isinstance(key, (str, int))]:
            raise ValueError(f"a key must be text, but for {DELETE}, or a whole number, not {shown(wrong[0])}")
        heads = [f"{key}=" if named else f"{scalar(key)}: " for key in value]
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")")
        heads, items = [""] * len(value), list(value)
    else:
        raise ValueError(f"{shown(value)} is no value of a configuration file")
    if len(indent) > MAX_LEVELS * len(INDENT):
        raise ValueError("is nested too deeply")
    inner = indent + INDENT
    texts = [head + literal(item, inner, len(head) + 1) for head, item in zip(heads, items, strict=True)]
    flat = opening + ", ".join(texts) + ("," if isinstance(value, tuple) and len(value) == 1 else "") + closing
    if "\n" not in flat and len(indent) + column + len(flat) <= WIDTH:
        return flat
    return opening + "\n" + "".join(f"{inner}{text},\n" for text in texts) + indent + closing


def scalar(value: bool | int | float | str | None) -> str:
    """Return the literal of a single value. Raises ValueError where the reader would refuse it."""
    if isinstance(value, str):
        return quote(value)
    if rule := scalar_fault(value):
        raise ValueError(f"{shown(value)} {rule}")
    return repr(value)


def is_name(text: str) -> bool:
    """Whether Python reads the text as a name, and as the same one: it takes some letters for others."""
    return text.isidentifier() and not iskeyword(text) and unicodedata.normalize("NFKC", text) == text
