from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longtake.buckets.mix import fill_window, fill_windows
from tests.precision import within

LEFT = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
SEED = st.integers(0, 1 << 32)


@given(LEFT, st.data())
def test_each_bucket_gets_its_share_of_a_window_rounded_up_or_down(left: list[int], data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, sum(left)))
    words = np.random.default_rng(data.draw(SEED)).integers(0, 1 << 32, num_slots + 2, dtype=np.uint32)
    counts = np.bincount(fill_window(np.array(left), num_slots, words), minlength=len(left))
    share = np.array(left) * num_slots / sum(left)
    assert counts.sum() == num_slots
    assert (counts <= left).all()
    assert (np.abs(counts - share) < 1).all()


def test_over_many_windows_a_rare_bucket_comes_up_as_often_as_its_share() -> None:
    rng = np.random.default_rng(0)
    left = np.array([1000, 20])
    counts = [fill_window(left, 10, rng.integers(0, 1 << 32, 12, dtype=np.uint32)).sum() for _ in range(5000)]
    assert within(abs(np.mean(counts) / 10 - 20 / 1020), 0.002)


def test_the_places_inside_a_window_are_shuffled() -> None:
    rng = np.random.default_rng(0)
    rare = [
        int(np.argmax(fill_window(np.array([9, 1]), 10, rng.integers(0, 1 << 32, 12, dtype=np.uint32))))
        for _ in range(400)
    ]
    assert set(rare) == set(range(10))


@given(LEFT, st.integers(1, 20), SEED)
def test_windows_use_up_every_bucket_exactly(left: list[int], window_slots: int, seed: int) -> None:
    slots = fill_windows(left, window_slots, seed=seed, stage=0, pass_index=0, era=0, first_window=0)
    assert np.bincount(slots, minlength=len(left)).tolist() == left


def test_every_seed_stage_pass_and_era_mixes_in_its_own_way() -> None:
    where = {"seed": 0, "stage": 0, "pass_index": 0, "era": 0, "first_window": 0}
    mixes = [fill_windows([40, 40], 20, **where | change) for change in ({}, *({name: 1} for name in where))]
    assert len({tuple(mix) for mix in mixes}) == 6


@given(LEFT, st.integers(1, 20), SEED, st.data())
def test_any_window_can_be_made_from_what_is_left_at_its_start(
    left: list[int], window_slots: int, seed: int, data: st.DataObject
) -> None:
    where = {"seed": seed, "stage": 2, "pass_index": 5, "era": 1}
    slots = fill_windows(left, window_slots, first_window=0, **where)
    window = data.draw(st.integers(0, len(slots) // window_slots))
    before = np.bincount(slots[: window * window_slots], minlength=len(left))
    rest = fill_windows(np.array(left) - before, window_slots, first_window=window, **where)
    np.testing.assert_array_equal(rest, slots[window * window_slots :])
