"""Slots of several micro-batches: what runs side by side on one mesh at a smaller sequence degree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.buckets.dealing import deal
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.mix import CostModel
from longtake.buckets.order import plan_pass
from longtake.contracts import Bucket, LatentShape, Slot
from tests.buckets.tables import inputs
from tests.buckets.test_order import digests, steps, through_json, trained

PEERS = 4  # S
DEGREES = {("32px", 1): 1, ("64px", 1): 2, ("32px", 5): 2}  # all else at 4
SIZES = {entry: PEERS // degree for entry, degree in DEGREES.items()}
COST = CostModel(2.0, 1.0, 0.01, LatentShape(16, 4, 8, causal=True), 2, side_by_side=4)


def at_once(bucket: Bucket) -> int:
    return SIZES.get((bucket.resolution, bucket.num_frames), 1)


def sized(num_clips: int = 300, **changes: object) -> OrderInputs:
    return inputs(num_clips, **({"slot_sizes": SIZES} | changes))


def micro_batches(made: OrderInputs) -> list[Slot]:
    return [slot for step in steps(plan_pass(made, 0)) for slot in step]


@settings(max_examples=40)
@given(st.integers(1, 150), st.integers(0, 20), st.integers(1, 6), st.integers(1, 5))
def test_larger_slots_lose_nothing_and_repeat_nothing(
    num_clips: int, table: int, slots_per_step: int, size: int
) -> None:
    made = inputs(num_clips + 20, table, slots_per_step=slots_per_step, slot_sizes={("32px", 1): size, ("32px", 5): 2})
    whole, order = plan_pass(replace(made, slot_sizes={}), 0), plan_pass(made, 0)
    assert sorted(trained(steps(order))) == sorted(trained(steps(whole)))
    assert order.num_samples == whole.num_samples
    assert order.report.num_steps == order.num_steps
    assert [len(step) > 0 for step in steps(order)] == [True] * order.num_steps
    assert max(len(step) for step in steps(order)) <= made.most_micro_batches


def test_a_slot_has_the_micro_batches_of_one_bucket_and_only_a_buckets_last_has_fewer() -> None:
    order = plan_pass(sized(400), 0)
    left = Counter({line.bucket.name: line.micro_batches for line in order.report.buckets})
    for index in range(order.num_steps):
        rest = order.step(index)
        for slot in order.slot_bucket[4 * index : 4 * index + 4].tolist():
            bucket = order.inputs.rule.buckets[slot]
            size = min(at_once(bucket), left[bucket.name])
            assert [one.bucket for one in rest[:size]] == [bucket] * size
            rest, left[bucket.name] = rest[size:], left[bucket.name] - size
        assert rest == []
    assert left.total() == 0


def test_buckets_keep_their_order_of_keys() -> None:
    for made in (sized(), sized(slot_sizes={})):
        slots = sorted(micro_batches(made), key=lambda slot: slot.bucket.name)
        for _, own in groupby(slots, key=lambda slot: slot.bucket.name):
            keys = [int(key) for slot in own for key in slot.keys[slot.weights > 0]]
            assert keys == sorted(keys)


@pytest.mark.parametrize("cost", [COST, None], ids=["balanced", "at random"])
def test_a_restart_at_any_step_goes_on_exactly(cost: CostModel | None) -> None:
    made = sized(600, cost=cost)
    order = plan_pass(made, 0)
    whole = digests(order)
    for step in range(0, order.num_steps + 1, 3):
        again = plan_pass(made, 0, through_json(order.state(step)))
        assert (digests(again), again.eras) == (whole[step:], ())
        assert again.num_samples == order.seek(step).num_samples


def test_other_sizes_in_the_middle_of_a_pass_are_an_era_and_lose_nothing() -> None:
    before = plan_pass(sized(), 0)
    seen = trained(steps(before)[:5])
    after = plan_pass(sized(slot_sizes={}), 0, through_json(before.state(5)))
    seen += trained(steps(after)[:4])
    back = plan_pass(sized(), 0, through_json(after.state(4)))
    assert [len(order.eras) for order in (after, back)] == [1, 2]
    assert sorted(seen + trained(steps(back))) == sorted(trained(steps(before)))


def test_sizes_of_one_are_no_change() -> None:
    plain = inputs(300)
    order = plan_pass(plain, 0)
    ones = replace(plain, slot_sizes={("32px", 1): 1, ("64px", 5): 1})
    assert plan_pass(ones, 0, order.state(3)).eras == ()
    assert ones.fingerprint(0) == plain.fingerprint(0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_sample_has_the_number_of_its_slot_on_any_number_of_ranks_and_after_a_restart(num_ranks: int) -> None:
    """What run side by side in one slot share its number; the last step of a pass may have fewer slots than others."""
    order = plan_pass(sized(400), 0)
    half = order.num_steps // 2
    again = plan_pass(order.inputs, 0, through_json(order.state(half)))
    for index in range(order.num_steps):
        buckets = order.slot_bucket[4 * index : 4 * index + 4].tolist()
        step = order.step(index) if index < half else again.step(index - half)
        found: dict[int, list[Slot]] = {}
        for rank in range(num_ranks):
            for forward in deal(step, num_ranks, rank, at_once):
                assert len({slot.number for slot in forward.slots}) == 1, "a forward is of one slot"
                found.setdefault(forward.slots[0].number, []).extend(slot for slot in forward.slots if slot.is_real)
        assert sorted(found) == list(range(len(buckets)))
        for number, slots in found.items():
            assert {slot.num_slots for slot in slots} == {len(buckets)}
            assert {slot.bucket for slot in slots} == {order.inputs.rule.buckets[buckets[number]]}
            assert 1 <= len(slots) <= at_once(slots[0].bucket)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_rank_idles_and_none_repeats_anothers_work(num_ranks: int) -> None:
    """All ranks make as many forwards; a place is empty only behind a bucket's last micro-batch or a pass's last slot.

    The work of a forward, samples times tokens over ranks, is compared with that of the whole group for everything.
    """
    order = plan_pass(sized(1500), 0)
    last = {slot.bucket.name: slot.samples.tolist() for step in steps(order) for slot in step}
    places = real = 0
    for step in steps(order)[:-1]:
        ranks = [deal(step, num_ranks, rank, at_once) for rank in range(num_ranks)]
        assert {len(forwards) for forwards in ranks} == {4 // num_ranks}, "a slot is one forward"
        for forward in chain.from_iterable(ranks):
            empty = [slot for slot in forward.slots if not slot.is_real]
            assert not empty or any(slot.samples.tolist() == last[slot.bucket.name] for slot in forward.slots)
            places, real = places + len(forward.slots), real + len(forward.slots) - len(empty)
    assert real / places > 0.95


@pytest.mark.parametrize("peers", [1, 2, 8])
def test_any_other_mesh_makes_the_same_steps(peers: int) -> None:
    """Slots of four peers, made by more or fewer of them in forwards of their own size."""
    for step in steps(plan_pass(sized(), 0)):
        told = []
        for rank in range(2):
            for forward in deal(step, 2, rank, lambda b: max(1, peers * at_once(b) // PEERS)):
                numbers = [forward.number(i) for i in range(len(forward.slots))]
                told += [(n, slot) for n, slot in zip(numbers, forward.slots, strict=True) if n is not None]
        assert [slot for _, slot in sorted(told, key=lambda pair: pair[0])] == step


@pytest.mark.parametrize("cost", [COST, None], ids=["balanced", "at random"])
def test_slots_side_by_side_cost_nearly_the_same_whatever_their_size(cost: CostModel | None) -> None:
    """The time of a slot is that of all its micro-batches on the whole group."""
    large = {("32px", 1): 8, ("64px", 1): 2, ("32px", 9): 4}
    order = plan_pass(sized(9000, cost=cost, slots_per_step=8, window_steps=64, slot_sizes=large), 0)
    slots = COST.costs(order.inputs.rule.buckets) * order.inputs.micro_batches
    side_by_side = slots[order.slot_bucket[: len(order.slot_bucket) // 4 * 4]].reshape(-1, 4)
    idle = 1 - side_by_side.mean() / side_by_side.max(axis=1).mean()
    assert idle < 0.05 if cost else idle > 0.2
