"""The clock of a run."""

from __future__ import annotations

import pytest

from longtake.contracts import UserError
from longtake.train import Clock


def test_a_step_counts_what_it_saw() -> None:
    clock = Clock().tick(0, 10, 100).tick(1, 7, 70)
    assert clock == Clock(global_step=2, pass_index=1, samples=17, tokens=170)


def test_a_clock_goes_through_json() -> None:
    clock = Clock(5, 1, 40, 4000)
    assert Clock.from_json(clock.to_json()) == clock


@pytest.mark.parametrize("damaged", [{}, {"global_step": 1}, dict.fromkeys(Clock().to_json(), "many")], ids=str)
def test_a_clock_that_is_none_is_refused(damaged: dict) -> None:
    with pytest.raises(UserError, match=r"run\.json: clock"):
        Clock.from_json(damaged)
