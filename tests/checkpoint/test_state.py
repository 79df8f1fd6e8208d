"""The state of a run: it comes back as it was, and damage is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.state import Clock, Frozen, RunState, Samples, SlotSizes
from longtake.contracts import UserError

STATE = RunState(
    Clock(5, 1, 40, 4000),
    data={"pass": 1, "last": {"32px/8f/1:1": 2**64 - 1, "32px/1f/1:1": None}, "cost": [0.1 + 0.2, 1e-300]},
    config="lr = 1e-4\n",
    name="tiny",
    slots_per_step=4,
    slot_sizes=SlotSizes(["auto", {"32px/8": 3}], {"32px": {"8": 1}}),
    frozen=Frozen("0123", 7, None),
    adapters={"blocks.0.proj": 0.5},
    skipped_steps=1,
    seconds={"steps": 0.1, "start": 3.0},
    samples=Samples(40, 2),
    versions={"torch": "2.11"},
)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    return save_checkpoint(folder, 0, 1, {"model.w": torch.ones(2)}, state)


def test_a_state_comes_back_with_every_field_and_bit(tmp_path: Path) -> None:
    assert RunState.read(saved(tmp_path, STATE.to_json())) == STATE


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("clock", {"global_step": "many", "pass_index": 0, "samples": 0, "tokens": 0}),
        ("clock", None),
        ("data", []),
        ("samples", "x"),
        ("slots_per_step", {}),
        ("slots_per_step", 0),
        ("slots_per_step", 10**18),
        ("clock", {"global_step": -3}),
        ("clock", {"global_step": 10**30}),
        ("skipped_steps", -1),
        ("slot_sizes", {"of": 1, "sizes": {"32px": {"many": 1}}}),
        ("frozen", {"digest": "0"}),
        ("adapters", {"layer": "half"}),
        ("seconds", 7),
    ],
)
def test_a_damaged_field_is_named(place: str, value: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, json.loads(json.dumps(STATE.to_json())) | {place: value})
    with pytest.raises(UserError, match=rf"run\.json: {place}.*; the checkpoint is not one of a run of this version"):
        RunState.read(path)


def test_a_state_without_its_clock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.json: clock: Field required"):
        RunState.read(saved(tmp_path, {}))
