"""A data position that somebody has edited is refused before anything is computed from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longtake.buckets.order import plan_pass
from longtake.contracts import UserError
from tests.buckets.tables import inputs

ERA = {"rule": {}, "views": 0, "last": {}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("window", -1),
        ("window", "1"),
        ("slots", 10**6),
        ("slots", None),
        ("window_start", []),
        ("last", {"32px": 1 << 64}),
        ("last", {"32px": {}}),
        ("eras", {}),
        ("eras", [ERA]),
        ("eras", [ERA | {"last": None}]),
        ("clips", ["one"]),
        ("seed", {}),
    ],
)
@pytest.mark.parametrize("changed", [False, True], ids=["same inputs", "new era"])
def test_position_with_an_impossible_field_is_refused(key: str, value: Any, changed: bool) -> None:
    state = json.loads(json.dumps(plan_pass(inputs(), 0).state(1)))
    state |= {key: value}
    made = inputs(slots_per_step=5) if changed else inputs()
    if changed and (key, value) == ("slots", 10**6):
        return  # a new era does not use it
    with pytest.raises(UserError, match="choose another one"):
        plan_pass(made, 0, state)


@pytest.mark.parametrize("key", ["window", "slots", "last", "eras", "rule", "inputs", "pass"])
def test_position_without_a_field_is_refused(key: str) -> None:
    state = plan_pass(inputs(), 0).state(1)
    del state[key]
    with pytest.raises(UserError, match=f"{key}: Field required"):
        plan_pass(inputs(), 0, state)
