"""Settings of adapters as files have them beside their matrices: PEFT's config, and kohya's keys in a header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from longtake.contracts import UserError
from longtake.small_files import parse_json, read_small
from longtake.weights.lora_names import strip_prefixes

CONFIG_HEADER = "lora_adapter_metadata"  # JSON in a file's header: PEFT's config, keys behind the component's name
PEFT_CONFIG = "adapter_config.json"
_MAX_EXPRESSIONS = 1000  # regular expressions in a table; names of layers are not counted
_MAX_EXPRESSION_LENGTH = 1000
_PLAIN_NAME = re.compile(r"[\w.-]+")
_Patterns = Mapping[str, float]


@dataclass(frozen=True)
class AdapterConfig:
    """Alpha of the layers that have no tensor for it."""

    alpha: float | None = None  # None: the rank
    rslora: bool = False  # the scaling is alpha / sqrt(rank)
    alpha_pattern: _Patterns = field(default_factory=dict)  # exceptions: name or regular expression of layers -> alpha
    place: str = ""  # names the file in messages

    def alphas(self, layers: Sequence[str]) -> dict[str, float | None]:
        """Alpha of each layer; None: its rank."""
        exceptions = match_patterns(self.alpha_pattern, layers, f"{self.place}: alpha_pattern")
        return {layer: exceptions.get(layer, self.alpha) for layer in layers}


def read_header(metadata: Mapping[str, str], place: str) -> AdapterConfig | None:
    """Return the config in a file's header; None where it has none. Raises `UserError` for one that is malformed."""
    values: dict[str, Any] = {}
    alpha = metadata.get("ss_network_alpha", "None")  # kohya writes None where there is none
    if alpha != "None":
        values["lora_alpha"] = _parse_number(alpha)
    if (text := metadata.get(CONFIG_HEADER)) is not None:
        place = f"{place}: {CONFIG_HEADER} in its header"
        values |= {strip_prefixes(key)[0]: value for key, value in _parse_object(text, place).items()}
    return _parse_config(values, place) if values else None


def read_config(file: Path) -> AdapterConfig:
    """PEFT's `adapter_config.json`. Raises `UserError` for one that is malformed or cannot be read."""
    try:
        text = read_small(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file}: cannot be read ({reason}); copy it again") from None
    return _parse_config(_parse_object(text, str(file)), str(file))


def positive_number(value: object, place: str) -> float:
    """Return a finite number above zero. Raises `UserError` for anything else."""
    try:
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = None
    if number is None or not isfinite(number) or number <= 0:
        raise UserError(
            f"{place}: expected a finite number above 0, got {str(value)[:40]!r}; export the adapters again"
        )
    return number


def match_patterns(patterns: _Patterns, layers: Iterable[str], place: str) -> dict[str, float]:
    """Return the value of the first pattern that each layer's name ends with; layers that match none are left out.

    Patterns are PEFT's: a name, or the end of one after a dot, or a regular expression for it; `^` pins it to the
    beginning. Names are looked up. Expressions are the file author's: RE2 matches them in linear time, which Python's
    `re` does not, so lookaround and back references are refused. Raises `UserError` for an expression that is not
    valid, and for too many or too long ones.
    """
    names: dict[tuple[bool, str], int] = {}
    expressions: dict[int, str] = {}
    for number, pattern in enumerate(patterns):
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if _PLAIN_NAME.fullmatch(name):
            names.setdefault((pattern.startswith("^"), name), number)
        else:
            expressions[number] = pattern
    layers, values = list(layers), list(patterns.values())
    first = {layer: min(_numbers_of_names(names, layer), default=len(values)) for layer in layers}
    for number, matched in _match_expressions(expressions, layers, place):
        first |= {layer: min(first[layer], number) for layer in matched}
    return {layer: values[number] for layer, number in first.items() if number < len(values)}


def _numbers_of_names(names: Mapping[tuple[bool, str], int], layer: str) -> list[int]:
    ends = [layer, *(layer[match.end() :] for match in re.finditer(r"\.", layer))]
    keys = [(True, layer), *((False, end) for end in ends)]
    return [names[key] for key in keys if key in names]


def _match_expressions(
    expressions: Mapping[int, str], layers: Sequence[str], place: str
) -> Iterable[tuple[int, list[str]]]:
    if not expressions:
        return
    if len(expressions) > _MAX_EXPRESSIONS:
        raise UserError(
            f"{place}: has {len(expressions):,} regular expressions, expected at most {_MAX_EXPRESSIONS:,}; name layers"
        )
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("create table layers as select unnest(?::varchar[]) as layer", [list(layers)])
        for number, expression in expressions.items():
            if len(expression) > _MAX_EXPRESSION_LENGTH:
                raise UserError(
                    f"{place}: a regular expression has {len(expression):,} characters, expected at most "
                    f"{_MAX_EXPRESSION_LENGTH:,}; name layers"
                )
            try:
                query = "select layer from layers where regexp_full_match(layer, ?)"
                rows = connection.execute(query, [rf"(.*\.)?({expression})"]).fetchall()
            except duckdb.Error:
                raise UserError(
                    f"{place}: {expression[:60]!r} is not a regular expression of RE2's syntax; name layers instead"
                ) from None
            yield number, [layer for (layer,) in rows]


def _parse_object(text: str | bytes, place: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"{place}: cannot be read as JSON ({error}); export the adapters again") from None
    if not isinstance(values, dict):
        raise UserError(f"{place}: expected a JSON object, the config of adapters; export the adapters again")
    return values


def _parse_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parse_config(values: Mapping[str, Any], place: str) -> AdapterConfig:
    if (kind := values.get("peft_type", "LORA")) != "LORA":
        raise UserError(f"{place}: holds adapters of the kind {str(kind)[:40]!r}, expected LORA; give LoRA or DoRA")
    if not isinstance(rslora := values.get("use_rslora", False), bool):
        raise UserError(f"{place}: use_rslora: expected true or false, got {str(rslora)[:40]!r}; export it again")
    patterns = {}
    for key in ("alpha_pattern", "rank_pattern"):
        table = values.get(key) or {}
        if not isinstance(table, dict):
            raise UserError(f"{place}: {key}: expected an object of layers and numbers; export the adapters again")
        patterns[key] = {name: positive_number(value, f"{place}: {key}") for name, value in table.items()}
    match_patterns(patterns["rank_pattern"], (), f"{place}: rank_pattern")  # ranks are the matrices' own
    alpha = positive_number(values["lora_alpha"], f"{place}: lora_alpha") if "lora_alpha" in values else None
    return AdapterConfig(alpha, rslora, patterns["alpha_pattern"], place)
