"""What there is to encode: shards are stretches of one order, and copies of a mix count as samples."""

from __future__ import annotations

import numpy as np
import pytest

from longtake.buckets.assignment import BucketRule
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import plan_pass
from longtake.contracts import Slot
from longtake.encode.plan import EncodePlan, make_plan

RULE = BucketRule.from_config({"256px": {1: (1.0, 4), 17: ((0.7, 0.2), 3), 5: (0.6, 2)}}, 16)


def inputs(num_clips: int = 300, weights: float | np.ndarray = 1.0, views: int = 3) -> OrderInputs:
    draw = np.random.default_rng(0)
    return OrderInputs(
        seed=3,
        stage=0,
        slots_per_step=2,
        rule=RULE,
        num_frames=draw.integers(1, 40, num_clips),
        height=draw.integers(200, 700, num_clips),
        width=draw.integers(200, 700, num_clips),
        fps=np.full(num_clips, 24.0),
        clip_ids=draw.integers(0, 1 << 60, num_clips).astype(np.uint64),
        weights=weights,
        views=views,
        table="t",
    )


def captions(slot: Slot) -> tuple[str, ...]:
    return tuple(f"caption {row % 7}" for row in slot.rows)


def samples_of_pass(given: OrderInputs, pass_index: int) -> set[tuple[int, str]]:
    order = plan_pass(given, pass_index)
    slots = [slot for step in range(order.num_steps) for slot in order.step(step)]
    return {(int(i), slot.bucket.name) for slot in slots for i, w in zip(slot.samples, slot.weights, strict=True) if w}


def samples_of_view(plan: EncodePlan, view: int) -> list[tuple[int, str]]:
    of = plan.view == view
    names = [RULE.buckets[bucket].name for bucket in plan.bucket[of]]
    return list(zip(plan.sample[of].tolist(), names, strict=True))


def test_a_view_is_what_its_passes_train_on() -> None:
    given = inputs()
    plan = make_plan(given, captions)
    for pass_index in range(2 * given.views):
        view = samples_of_view(plan, pass_index % given.views)
        assert len(view) == len(set(view))
        assert set(view) == samples_of_pass(given, pass_index)


def test_a_view_holds_the_copies_that_any_of_its_passes_draws() -> None:
    weights = np.where(np.arange(300) < 150, 1.4, 0.3)
    plan = make_plan(inputs(weights=np.ceil(weights)), captions)
    given, seen = inputs(weights=weights), []
    for pass_index in range(0, 24, given.views):
        taken = samples_of_pass(given, pass_index)
        seen.append(taken)
        assert taken <= set(samples_of_view(plan, 0))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_shards_cover_the_plan_and_hold_one_bucket_of_one_view(size: int) -> None:
    plan = make_plan(inputs(), captions)
    shards = plan.latent_shards(lambda bucket: size)
    assert shards[0, 0] == 0
    assert shards[-1, 1] == len(plan)
    assert (shards[1:, 0] == shards[:-1, 1]).all()
    for start, stop in shards.tolist():
        assert 0 < stop - start <= size
        assert len(set(zip(plan.view[start:stop], plan.bucket[start:stop], strict=True))) == 1


def test_captions_are_listed_once_by_their_first_entry(tmp_path) -> None:
    plan = make_plan(inputs(), captions)
    assert len(plan.first_of_texts) == 7
    assert len(set(plan.text[plan.first_of_texts])) == 7
    assert plan.first_of_texts[0] == 0
    assert plan.text_shards(3).tolist() == [[0, 3], [3, 6], [6, 7]]
    plan.write(tmp_path / "plan.arrow")
    again = EncodePlan.read(tmp_path / "plan.arrow", {})
    assert all(
        (getattr(again, name) == getattr(plan, name)).all() for name in ("view", "bucket", "row", "sample", "text")
    )
