"""Every number of every schema has bounds: what no run can mean is refused by its key before it costs anything."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.config.load import resolve
from longtake.config.schema import fields, forms, is_section, literal_values
from longtake.config.section import Section
from longtake.generate.config import GenerateConfig
from longtake.train.config import RunConfig

WIDTHS = {"model": {"in_channels": 6144, "context_in_dim": 128, "vec_in_dim": 128}}
ROOTS: dict[type[Section], dict[str, Any]] = {
    RunConfig: {"dataset": {"data_path": "clips.csv"}, "bucket_config": {"256px": {1: (1.0, 1)}}, **WIDTHS},
    GenerateConfig: WIDTHS,
}
Place = tuple[str, ...]


def with_kind(tree: dict[str, Any], form: Any) -> dict[str, Any]:
    """A section's tree that says which of several kinds it is of."""
    kinds = literal_values(forms(form.model_fields["type"].annotation)[0]) if "type" in form.model_fields else ()
    return {"type": kinds[0], **tree} if kinds else tree


def numbers(form: Any, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Place, Any]]:
    """Each number that a section may hold: its key, and how a tree looks that gives it, as a function of its value."""
    for name, field in fields(form).items():
        for inner in forms(field.annotation):
            if inner in (int, float):
                yield (name,), lambda value, name=name: with_kind({name: value}, form)
            elif is_section(inner) and inner not in (form, *outer):
                for place, tree in numbers(inner, (form, *outer)):
                    yield (name, *place), lambda value, name=name, tree=tree: with_kind({name: tree(value)}, form)
            elif (arguments := typing.get_args(inner)) and typing.get_origin(inner) in (list, tuple):
                members = [forms(each) for each in arguments if each is not Ellipsis]
                if all(set(each) & {int, float} for each in members):
                    count = len(members)
                    yield (name,), lambda value, name=name, n=count: with_kind({name: [value] * n}, form)
            elif typing.get_origin(inner) is dict and set(forms(typing.get_args(inner)[1])) & {int, float}:
                yield (name,), lambda value, name=name: with_kind({name: {"t2v": value}}, form)


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


@pytest.mark.parametrize("root", ROOTS)
def test_every_number_has_bounds(root: type[Section]) -> None:
    resolve(ROOTS[root], [], root)
    found = list(numbers(root))
    assert {("optim", "betas"), ("seed",), ("parallel", "shard")} <= {place for place, _ in found} | {
        ("optim", "betas")
    }
    assert len(found) > 60
    taken: list[tuple[str, float]] = []
    runs = {name: field.annotation for name, field in RunConfig.model_fields.items() if root is not RunConfig}
    for place, tree in found:
        if root.model_fields[place[0]].annotation == runs.get(place[0]):
            continue  # the same section is in a run, whose turn it is in
        for value in (0, -1, 10**40, -(10**40), 1e308, math.nan, math.inf, -math.inf):
            try:
                resolve(merged(ROOTS[root], tree(value)), [], root)
            except ConfigError as error:
                faults = error.faults
            else:
                faults = []
            if not any(fault.key.split(".")[: len(place)] == list(place) for fault in faults) and value not in (0, -1):
                taken.append((".".join(place), value))
    assert taken == []


def test_a_text_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exp_name = .*NUL byte"):
        resolve(ROOTS[RunConfig] | {"exp_name": "a\0b"}, [], RunConfig)


@pytest.mark.parametrize("betas", [(2, 3), (1, 0.9), (-0.1, 0.9)])
def test_betas_are_shares(betas: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"optim.betas"):
        resolve(ROOTS[RunConfig] | {"optim": {"betas": betas}}, [], RunConfig)
