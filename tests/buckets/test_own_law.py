"""The order of a pass under a law that a family brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import plan_pass
from longtake.buckets.protocol import KIND, Columns, keyed_draw
from longtake.contracts import UserError
from tests.buckets.own_law import TokenBudget
from tests.buckets.tables import inputs
from tests.buckets.test_order import digests, steps, through_json, trained


def own(num_clips: int = 200, table: int = 0, **changes: Any) -> OrderInputs:
    return inputs(num_clips, table, **{"rule": TokenBudget(), **changes})


def test_sizes_are_drawn_and_lengths_keep_to_the_budget() -> None:
    made = own(600)
    report = plan_pass(made, 0).report
    assert {line.bucket.resolution for line in report.buckets} == {"16px", "32px", "48px"}
    assert max(line.bucket.num_frames for line in report.buckets if line.bucket.resolution == "16px") == 9
    assert all(np.prod(line.bucket.shape) <= 16 * 16 * 9 for line in report.buckets)
    assert report.num_used + sum(line.clips for line in report.unused) == 600
    codes = {view: made.rule.assign_chunk(_columns(made), keyed_draw(7, 0, view, made.clip_ids))[0] for view in (0, 1)}
    assert (codes[0] != codes[1]).any(), "another pass draws other sizes"


@settings(max_examples=20)
@given(st.integers(1, 150), st.integers(0, 20), st.data())
def test_an_order_of_a_law_of_its_own_restarts_and_changes_in_mid_pass_without_loss(
    num_clips: int, table: int, data: st.DataObject
) -> None:
    made = own(num_clips + 30, table)
    order = plan_pass(made, 0)
    place = data.draw(st.integers(0, order.num_steps))
    state = through_json(order.state(place))
    assert digests(plan_pass(made, 0, state)) == digests(order)[place:]
    others = [TokenBudget(sizes=(16,)), inputs().rule]
    for rule in others:  # seen before the change, or after it: none twice
        after = trained(steps(plan_pass(own(num_clips + 30, table, rule=rule), 0, state)))
        seen = trained(steps(order)[:place]) + after
        assert len(seen) == len(set(seen))


def test_a_law_that_is_not_known_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    order = plan_pass(own(), 0)
    state = plan_pass(own(rule=inputs().rule), 0, through_json(order.state(2))).state(1)
    assert state["eras"][0]["rule"][KIND] == "token budget"
    assert plan_pass(own(rule=inputs().rule), 0, through_json(state)).eras
    monkeypatch.setattr("longtake.buckets.assignment._READERS", {})
    with pytest.raises(UserError, match=r"'token budget'.*--start-epoch"):
        plan_pass(own(rule=inputs().rule), 0, through_json(state))


def _columns(made: OrderInputs) -> Columns:
    return tuple(np.asarray(column, np.float64) for column in (made.num_frames, made.height, made.width, made.fps))
