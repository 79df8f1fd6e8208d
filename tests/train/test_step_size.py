"""The size of a step after a change of the number of processes."""

from __future__ import annotations

import pytest

from longtake.checkpoint.state import Clock, RunState
from longtake.train.config import RunConfig
from longtake.train.start import step_size_lines


@pytest.mark.parametrize(
    ("keys", "saved", "ranks", "idle", "proposed"),
    [
        ({}, 2, 4, "2 of 4", 4),
        ({}, 8, 4, None, 4),
        ({"accumulation_steps": 4}, 2, 2, None, 8),
        ({"slots_per_step": 6}, None, 4, "2 of 4", 8),
    ],
    ids=["more processes", "fewer processes", "accumulation_steps overruled", "set and uneven"],
)
def test_inherited_or_uneven_step_size_is_reported_with_its_flag(
    keys: dict[str, int], saved: int | None, ranks: int, idle: str | None, proposed: int
) -> None:
    (line,) = lines_of(keys, saved, ranks)
    assert f"--slots-per-step {proposed} " in line
    assert f"slots_per_step = {keys.get('slots_per_step') or saved}" in line
    assert ("padding" in line) == (idle is not None)
    assert (idle or "") in line


@pytest.mark.parametrize(("keys", "saved", "ranks"), [({}, 4, 4), ({}, None, 4), ({"slots_per_step": 8}, 2, 4)])
def test_step_size_of_this_launch_is_not_reported(keys: dict[str, int], saved: int | None, ranks: int) -> None:
    assert lines_of(keys, saved, ranks) == []


def lines_of(keys: dict[str, int], saved: int | None, ranks: int) -> list[str]:
    config = RunConfig.model_construct(**{"slots_per_step": None, "accumulation_steps": 1} | keys)
    return step_size_lines(config, RunState(Clock(), slots_per_step=saved), ranks)
