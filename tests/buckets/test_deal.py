from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.buckets import deal, plan_pass, step_digest
from longtake.contracts import Slot
from tests.buckets.tables import inputs

ORDER = plan_pass(inputs(slots_per_step=12), 0)


def _step(num_slots: int) -> list[Slot]:
    return ORDER.step(0)[:num_slots]


@given(st.integers(1, 12), st.integers(1, 20))
def test_every_slot_is_run_once_and_all_ranks_make_the_same_number_of_forwards(num_slots: int, num_ranks: int) -> None:
    slots = _step(num_slots)
    ranks = [deal(slots, num_ranks, 12, rank) for rank in range(num_ranks)]
    num_micro_steps = -(-num_slots // num_ranks)
    assert [len(rank) for rank in ranks] == [num_micro_steps] * num_ranks
    in_order = [ranks[rank][micro_step] for micro_step in range(num_micro_steps) for rank in range(num_ranks)]
    assert [id(slot) for slot in in_order if slot.is_real] == [id(slot) for slot in slots]
    assert step_digest(in_order) == step_digest(slots)


def test_a_rank_without_work_gets_the_cheapest_shape_at_weight_zero() -> None:
    slots = _step(7)
    cost = [
        slot.bucket.shape[0] * slot.bucket.shape[1] * slot.bucket.shape[2] * slot.bucket.batch_size for slot in slots
    ]
    assert len(set(cost)) > 1
    padding = deal(slots, 4, 12, 3)[1]
    assert not padding.is_real
    assert padding.bucket == slots[cost.index(min(cost))].bucket
    assert slots[cost.index(min(cost))].is_real  # the slot it was made from is untouched


def test_the_digest_knows_the_samples_and_their_order() -> None:
    slots = _step(5)
    assert 0 <= step_digest(slots) < 1 << 64
    assert len({step_digest(slots), step_digest(slots[::-1]), step_digest(slots[:4]), step_digest(ORDER.step(1))}) == 4


def test_a_rank_outside_the_group_or_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="rank = 4"):
        deal(_step(3), 4, 12, 4)
    with pytest.raises(ValueError, match="0 slots"):
        deal([], 4, 12, 0)
    with pytest.raises(ValueError, match=r"1\.\.2"):
        deal(_step(3), 4, 2, 0)
