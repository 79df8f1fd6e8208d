from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from longtake.buckets.dealing import Forward, deal, step_digest
from longtake.buckets.order import plan_pass
from longtake.contracts import Bucket, Slot
from tests.buckets.tables import inputs

ORDER = plan_pass(inputs(slots_per_step=12), 0)


def _step(num_slots: int) -> list[Slot]:
    return ORDER.step(0)[:num_slots]


def _all_ranks(slots: Sequence[Slot], num_ranks: int, at_once: Callable[[Bucket], int]) -> list[list[Forward]]:
    return [deal(slots, num_ranks, rank, at_once) for rank in range(num_ranks)]


def _told(ranks: Sequence[Sequence[Forward]]) -> dict[int, Slot]:
    """Every micro-batch that counts, by its number in the step."""
    found = [
        (number, slot)
        for forwards in ranks
        for forward in forwards
        for index, slot in enumerate(forward.slots)
        if (number := forward.number(index)) is not None
    ]
    assert len(found) == len(dict(found)), "a micro-batch is run twice"
    return dict(found)


@given(st.integers(1, 12), st.integers(1, 20))
def test_every_slot_is_run_once_and_all_ranks_make_the_same_number_of_forwards(num_slots: int, num_ranks: int) -> None:
    slots = _step(num_slots)
    ranks = _all_ranks(slots, num_ranks, lambda bucket: 1)
    num_micro_steps = -(-num_slots // num_ranks)
    assert [len(rank) for rank in ranks] == [num_micro_steps] * num_ranks
    in_order = [ranks[rank][micro_step].slots[0] for micro_step in range(num_micro_steps) for rank in range(num_ranks)]
    assert [id(slot) for slot in in_order if slot.is_real] == [id(slot) for slot in slots]
    assert step_digest(in_order) == step_digest(slots)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 11))
def test_side_by_side_or_not_every_micro_batch_is_run_once_in_forwards_of_one_bucket(
    num_slots: int, num_ranks: int, stills: int, first: int
) -> None:
    slots = (ORDER.step(0) + ORDER.step(1))[first : first + num_slots]

    def at_once(bucket: Bucket) -> int:
        return stills if bucket.num_frames == 1 else 1

    ranks = _all_ranks(slots, num_ranks, at_once)
    told = _told(ranks)
    assert [id(told[number]) for number in range(len(slots))] == [id(slot) for slot in slots]
    assert len({len(forwards) for forwards in ranks}) == 1
    for forward in chain.from_iterable(ranks):
        assert len({slot.bucket for slot in forward.slots}) == 1
        assert len(forward.slots) == at_once(forward.slots[0].bucket)
        weights = [slot.is_real for slot in forward.slots]
        assert weights == sorted(weights, reverse=True), "fillers come last"


def test_a_rank_without_work_gets_the_cheapest_shape_at_weight_zero() -> None:
    slots = _step(7)
    cost = [
        slot.bucket.shape[0] * slot.bucket.shape[1] * slot.bucket.shape[2] * slot.bucket.batch_size for slot in slots
    ]
    assert len(set(cost)) > 1
    (padding,) = deal(slots, 4, 3)[1].slots
    assert not padding.is_real
    assert padding.bucket == slots[cost.index(min(cost))].bucket
    assert slots[cost.index(min(cost))].is_real  # the slot it was made from is untouched


def test_the_digest_knows_the_samples_and_their_order() -> None:
    slots = _step(5)
    assert 0 <= step_digest(slots) < 1 << 64
    assert len({step_digest(slots), step_digest(slots[::-1]), step_digest(slots[:4]), step_digest(ORDER.step(1))}) == 4
