from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.buckets.dealing import step_digest
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import PassOrder, plan_pass
from longtake.contracts import Slot, UserError
from tests.buckets.tables import CONFIG, clip_columns, inputs, rule


def trained(steps: list[list[Slot]]) -> list[int]:
    """The ids of the samples that train in some steps, in order."""
    return [int(sample) for step in steps for slot in step for sample in slot.samples[slot.weights > 0]]


def steps(order: PassOrder) -> list[list[Slot]]:
    return [order.step(index) for index in range(order.num_steps)]


def digests(order: PassOrder) -> list[int]:
    return [step_digest(step) for step in steps(order)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


CONFIGS = st.dictionaries(
    st.sampled_from(["16px", "32px", "48px_ar1:1", "64px", "36p_max"]),
    st.dictionaries(
        st.sampled_from([1, 5, 9, 13]),
        st.tuples(st.sampled_from([0.3, 0.7, 1.0]), st.integers(1, 7)),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def order_inputs(draw: st.DrawFn) -> OrderInputs:
    num_clips = draw(st.integers(1, 120))
    weights: Any = draw(st.sampled_from([1.0, 1.0, 0.5, 2.0, 2.4, None]))
    if weights is None:
        weights = np.random.default_rng(num_clips).choice([0.0, 0.3, 1.0, 3.5], num_clips)
        weights[0] = 1.0
    return inputs(
        num_clips,
        draw(st.integers(0, 1000)),
        seed=draw(st.integers(0, 1 << 40)),
        stage=draw(st.integers(0, 3)),
        slots_per_step=draw(st.integers(1, 9)),
        window_steps=draw(st.integers(1, 8)),
        rule=rule(draw(CONFIGS)),
        weights=weights,
        views=draw(st.sampled_from([0, 0, 1, 3])),
    )


def plan_or_skip(made: OrderInputs, pass_index: int) -> PassOrder | None:
    """None where none of the made-up clips fits any made-up bucket."""
    try:
        return plan_pass(made, pass_index)
    except UserError as error:
        if "fits a bucket" not in str(error):
            raise
        return None


@settings(max_examples=60)
@given(order_inputs(), st.integers(0, 5))
def test_a_pass_trains_every_sample_that_has_a_bucket_exactly_once(made: OrderInputs, pass_index: int) -> None:
    order = plan_or_skip(made, pass_index)
    if order is None:
        return
    found = trained(steps(order))
    assert len(found) == len(set(found)) == order.num_samples == order.report.num_samples
    assert order.num_steps == order.report.num_steps
    known = set(map(int, made.samples(pass_index)[1]))
    assert set(found) <= known
    assert order.report.num_used + sum(line.clips for line in order.report.unused) == made.num_clips


@settings(max_examples=60)
@given(order_inputs(), st.data())
def test_after_a_restart_the_same_steps_follow_at_any_position(made: OrderInputs, data: st.DataObject) -> None:
    order = plan_or_skip(made, 1)
    if order is None:
        return
    expected = digests(order)
    report = order.report
    done = 0
    for _ in range(data.draw(st.integers(1, 3))):  # restarts in a row
        here = data.draw(st.integers(0, order.num_steps))
        done += here
        order = plan_pass(made, 1, through_json(order.state(here)))
        assert digests(order) == expected[done:]
        assert order.report == report
        assert order.num_samples == len(trained(steps(order)))


def test_a_restart_in_the_middle_of_a_window_gives_the_same_slots_to_the_last_bit() -> None:
    order = plan_pass(inputs(), 0)
    again = plan_pass(inputs(), 0, through_json(order.state(4)))  # windows of three steps
    assert (again.window, again.position) == (1, 4)
    for mine, theirs in zip(steps(again), steps(order)[4:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.bucket == b.bucket
            for name in ("rows", "samples", "keys", "weights"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert again.state(2) == order.state(6)


def test_a_slot_has_the_documented_shapes_and_types() -> None:
    made = inputs()
    for slot in [slot for step in steps(plan_pass(made, 3)) for slot in step]:
        size = (slot.bucket.batch_size,)
        assert (slot.rows.dtype, slot.rows.shape) == (np.dtype(np.int64), size)
        assert (slot.samples.dtype, slot.samples.shape) == (np.dtype(np.uint64), size)
        assert (slot.keys.dtype, slot.keys.shape) == (np.dtype(np.uint64), size)
        assert (slot.weights.dtype, slot.weights.shape) == (np.dtype(np.float32), size)
        assert slot.pass_index == 3
        assert slot.is_real
        np.testing.assert_array_equal(made.clip_ids[slot.rows], slot.samples)


def test_a_bucket_runs_its_samples_by_ascending_key_and_fills_up_only_its_last_micro_batch() -> None:
    order = plan_pass(inputs(rule=rule({"32px": {1: (1.0, 7), 5: (1.0, 5)}})), 0)
    by_bucket: dict[str, list[Slot]] = {}
    for slot in [slot for step in steps(order) for slot in step]:
        by_bucket.setdefault(slot.bucket.name, []).append(slot)
    fillers = 0
    for slots in by_bucket.values():
        keys = np.concatenate([slot.keys[slot.weights > 0] for slot in slots])
        assert (np.diff(keys.astype(object)) > 0).all()
        assert all(slot.weights.all() for slot in slots[:-1])
        num_real = int(slots[-1].weights.sum())
        np.testing.assert_array_equal(slots[-1].weights, np.arange(len(slots[-1].weights)) < num_real)
        np.testing.assert_array_equal(
            slots[-1].samples, np.resize(slots[-1].samples[:num_real], len(slots[-1].samples))
        )
        fillers += len(slots[-1].weights) - num_real
    assert fillers > 0
    assert fillers == order.report.num_fillers


def test_only_the_last_step_of_a_pass_may_be_short() -> None:
    sizes = [len(step) for step in steps(plan_pass(inputs(), 0))]
    assert set(sizes[:-1]) == {4}
    assert 1 <= sizes[-1] <= 4


def test_a_set_smaller_than_one_micro_batch_still_trains() -> None:
    order = plan_pass(inputs(1, rule=rule({"16px": {1: (1.0, 50), 2: (1.0, 50)}}), table_seed=3), 0)
    (slot,) = order.step(0)
    assert order.num_steps == 1
    assert slot.weights.tolist() == [1.0] + [0.0] * 49
    assert (slot.rows == 0).all()


def test_passes_stages_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        trained(steps(plan_pass(inputs(rule=rule({"16px": {1: (1.0, 2), 2: (1.0, 2)}}), **which), pass_index)))
        for which, pass_index in (({}, 0), ({}, 1), ({"stage": 1}, 0), ({"seed": 8}, 0))
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert len({frozenset(order) for order in orders}) == 1


def test_the_order_does_not_depend_on_the_order_of_the_rows() -> None:
    columns = clip_columns(300)
    shuffled = np.random.default_rng(0).permutation(300)
    moved = {name: values[shuffled] for name, values in columns.items()}
    assert digests(plan_pass(inputs(300, **columns), 0)) == digests(plan_pass(inputs(300, **moved), 0))


def test_a_window_holds_the_buckets_in_proportion() -> None:
    made = inputs(4000, window_steps=16, slots_per_step=8)
    order = plan_pass(made, 0)
    left = {line.bucket.name: line.micro_batches for line in order.report.buckets}
    for first in range(0, order.num_steps - 16, 16):
        slots = [slot.bucket.name for index in range(first, first + 16) for slot in order.step(index)]
        total = sum(left.values())
        for name in left:
            assert abs(slots.count(name) - 128 * left[name] / total) < 1
            left[name] -= slots.count(name)


def test_seek_moves_the_position_without_changing_the_order() -> None:
    order = plan_pass(inputs(), 0)
    moved = order.seek(5)
    assert digests(moved) == digests(order)[5:]
    assert moved.state(1) == order.state(6)
    assert order.seek(order.num_steps).num_steps == 0
    for wrong in (-1, order.num_steps + 1):
        with pytest.raises(IndexError):
            order.seek(wrong)
    with pytest.raises(IndexError):
        order.step(order.num_steps)


def test_a_finished_pass_has_no_steps_left() -> None:
    first = plan_pass(inputs(), 0)
    end = through_json(first.state(first.num_steps))
    assert plan_pass(inputs(), 0, end).num_steps == 0


@pytest.mark.parametrize("change", [{"seed": 8}, {"stage": 1}])
def test_a_state_of_another_run_is_refused_with_a_sentence(change: dict[str, int]) -> None:
    state = plan_pass(inputs(), 0).state(2)
    with pytest.raises(UserError, match=next(iter(change))):
        plan_pass(inputs(**change), 0, state)


def test_a_state_of_another_pass_or_format_is_refused() -> None:
    state = plan_pass(inputs(), 0).state(2)
    with pytest.raises(UserError, match="pass is 1"):
        plan_pass(inputs(), 1, state)
    with pytest.raises(UserError, match="format 2"):
        plan_pass(inputs(), 0, state | {"format": 2})


def test_a_clip_of_weight_two_trains_twice_and_one_of_weight_zero_never() -> None:
    everything = rule({"16px": {1: (1.0, 2), 2: (1.0, 2)}})
    weights = np.where(np.arange(200) % 2 == 0, 2.0, 0.0)
    rows = [row for step in steps(plan_pass(inputs(rule=everything, weights=weights), 0)) for slot in step
            for row in slot.rows[slot.weights > 0]]  # fmt: skip
    once = {row for step in steps(plan_pass(inputs(rule=everything), 0)) for slot in step for row in slot.rows}
    assert sorted(rows) == sorted([row for row in once if row % 2 == 0] * 2)


def test_a_fractional_weight_takes_its_share_of_the_clips_and_others_in_the_next_pass() -> None:
    everything = rule({"16px": {1: (1.0, 2), 2: (1.0, 2)}})
    whole = plan_pass(inputs(4000, rule=everything), 0).num_samples
    takes = [set(trained(steps(plan_pass(inputs(4000, rule=everything, weights=0.25), p)))) for p in (0, 1)]
    assert [len(take) / whole for take in takes] == pytest.approx([0.25, 0.25], abs=0.03)
    assert len(takes[0] & takes[1]) / whole == pytest.approx(0.25**2, abs=0.02)


@pytest.mark.parametrize("weights", [-1.0, float("nan"), 0.0])
def test_impossible_weights_are_answered_with_a_sentence(weights: float) -> None:
    with pytest.raises(UserError, match="mix weight"):
        inputs(weights=weights)


def test_with_views_the_bucket_draws_repeat_and_the_order_does_not() -> None:
    def buckets_of(pass_index: int, views: int) -> tuple[dict[int, str], list[int]]:
        order = plan_pass(inputs(views=views), pass_index)
        slots = [slot for step in steps(order) for slot in step]
        return {int(s): slot.bucket.name for slot in slots for s in slot.samples}, trained(steps(order))

    assert buckets_of(0, 2)[0] == buckets_of(2, 2)[0]
    assert buckets_of(0, 2)[0] != buckets_of(1, 2)[0]
    assert buckets_of(0, 2)[1] != buckets_of(2, 2)[1]
    assert buckets_of(0, 0)[0] != buckets_of(2, 0)[0]


def test_a_sample_in_quarantine_keeps_its_place_in_its_pass_and_is_left_out_from_the_next_one() -> None:
    whole = plan_pass(inputs(), 1)
    failed = trained(steps(whole))[3]
    assert digests(plan_pass(inputs(quarantined={failed: 1}), 1)) == digests(whole)
    assert plan_pass(inputs(quarantined={failed: 1}), 1, whole.state(5)).num_steps == whole.num_steps - 5
    later = plan_pass(inputs(quarantined={failed: 0, 12345: 0}), 1)
    assert sorted([*trained(steps(later)), failed]) == sorted(trained(steps(whole)))
    (line,) = [line for line in later.report.unused if line.reason.name == "QUARANTINED"]
    assert line.clips == 1


def test_two_clips_with_the_same_id_are_refused() -> None:
    columns = {name: np.repeat(values[:1], 2) for name, values in clip_columns(1, 3).items()}
    columns |= {"num_frames": np.array([1, 1]), "height": np.array([64, 64]), "width": np.array([64, 64])}
    with pytest.raises(UserError, match=r"clip_id \d+ occurs more than once"):
        plan_pass(inputs(2, **columns, rule=rule({"32px": CONFIG["32px"]})), 0)
