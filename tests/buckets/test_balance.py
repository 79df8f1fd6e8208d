from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.mix import CostModel, balance_window, fill_windows, fit_cost
from longtake.buckets.order import plan_pass
from longtake.contracts import LatentShape, UserError
from tests.buckets.tables import inputs
from tests.buckets.test_order import digests, steps, through_json, trained

COST = CostModel(2.0, 1.0, 0.01, LatentShape(16, 4, 8, causal=True), 2, side_by_side=4)


def balanced(num_clips: int = 800, **changes: object) -> OrderInputs:
    return inputs(num_clips, **({"cost": COST, "slots_per_step": 8, "window_steps": 8} | changes))


def test_the_cost_of_a_micro_batch_is_the_formula_of_its_tokens() -> None:
    bucket = plan_pass(inputs(), 0).report.buckets[0].bucket
    made = replace(bucket, shape=(33, 64, 48), batch_size=3)
    assert COST.tokens(made.shape) == 9 * 4 * 3
    assert COST.cost(made) == pytest.approx(3 * (2 + 108 + 0.01 * 108**2))
    assert CostModel.from_json(json.loads(json.dumps(COST.to_json()))) == COST


def test_constants_are_found_again_from_measurements_and_never_negative() -> None:
    tokens = np.array([256, 1024, 4096, 16384, 20000])
    assert fit_cost(tokens, 3.0 + 0.5 * tokens + 2e-5 * tokens**2) == pytest.approx((3.0, 0.5, 2e-5), rel=1e-6)
    assert min(fit_cost(tokens, 2.0 * tokens - 100)) >= 0
    with pytest.raises(UserError, match="at least three"):
        fit_cost([1, 2, 2], [1, 2, 2])
    with pytest.raises(UserError, match="at least 0"):
        replace(COST, linear=-1.0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 12), st.integers(0, 99))
def test_balancing_keeps_the_slots_of_a_window_and_groups_like_with_like(
    filled: list[int], side_by_side: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.random(6)
    words = rng.integers(0, 1 << 32, len(filled), dtype=np.uint32)
    found = balance_window(np.array(filled), costs, side_by_side, words)
    assert sorted(found) == sorted(filled)
    num_groups = len(filled) // side_by_side
    groups = costs[found[: num_groups * side_by_side]].reshape(num_groups, side_by_side)
    ranges = sorted((group.min(), group.max()) for group in groups)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))


def idle(order_inputs: OrderInputs, num_ranks: int) -> float:
    """Share of the ranks' time spent waiting for the slowest of them, over the full steps of a pass."""
    order = plan_pass(order_inputs, 0)
    costs = [[COST.cost(slot.bucket) for slot in step] for step in steps(order)[:-1]]
    forwards = np.array(costs).reshape(-1, num_ranks)
    return float(1 - forwards.mean() / forwards.max(axis=1).mean())


def test_ranks_side_by_side_hardly_wait_for_each_other() -> None:
    assert idle(balanced(6000, window_steps=64), 4) < 0.03
    assert idle(balanced(6000, window_steps=64), 2) < 0.03  # the same order on fewer ranks
    assert idle(balanced(6000, window_steps=64, cost=None), 4) > 0.2


def test_a_balanced_pass_trains_the_same_samples_and_survives_restarts() -> None:
    plain, order = plan_pass(balanced(cost=None), 0), plan_pass(balanced(), 0)
    assert sorted(trained(steps(order))) == sorted(trained(steps(plain)))
    assert digests(order) != digests(plain)
    for taken in (1, 9, order.num_steps - 1):
        assert digests(plan_pass(balanced(), 0, through_json(order.state(taken)))) == digests(order)[taken:]


def test_new_constants_begin_an_era_and_lose_nothing() -> None:
    order = plan_pass(balanced(), 0)
    state = through_json(order.state(5))
    assert CostModel.from_json(state["cost"]) == COST
    changed = plan_pass(balanced(cost=replace(COST, quadratic=0.0)), 0, state)
    assert len(changed.eras) == 1
    before = trained(steps(order)[:5])
    assert sorted(before + trained(steps(changed))) == sorted(trained(steps(order)))


def test_one_slot_at_a_time_needs_no_balance() -> None:
    alone = replace(COST, side_by_side=1)
    assert digests(plan_pass(balanced(cost=alone), 0)) == digests(plan_pass(balanced(cost=None), 0))


def test_any_balanced_window_can_be_made_from_what_is_left_at_its_start() -> None:
    where = {"seed": 3, "stage": 1, "pass_index": 2, "era": 0, "costs": np.arange(5.0), "side_by_side": 4}
    left = np.array([30, 21, 7, 55, 3])
    slots = fill_windows(left, 16, first_window=0, **where)
    before = np.bincount(slots[:48], minlength=5)
    np.testing.assert_array_equal(fill_windows(left - before, 16, first_window=3, **where), slots[48:])


@pytest.mark.parametrize("cost", [COST, None], ids=["balanced", "at random"])
def test_a_restart_at_any_step_goes_on_as_the_pass_would_have_to_its_last_window(cost: CostModel | None) -> None:
    made = balanced(600, slots_per_step=4, window_steps=16, cost=cost)
    order = plan_pass(made, 0)
    assert order.num_steps > 2 * 16
    assert order.num_steps % 16, "the last window is a short one"
    whole = digests(order)
    for step in range(order.num_steps + 1):
        assert digests(plan_pass(made, 0, through_json(order.state(step)))) == whole[step:]
