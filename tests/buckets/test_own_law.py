"""A law that a family brings: random sizes, and as many frames as a budget of tokens lets them have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.buckets import (
    BucketDraw,
    BucketLaw,
    Columns,
    OrderInputs,
    Timing,
    Unused,
    keyed_draw,
    plan_pass,
    register_law,
)
from longtake.buckets.protocol import KIND
from longtake.contracts import Bucket, UserError
from tests.buckets.tables import inputs
from tests.buckets.test_order import digests, steps, through_json, trained

STRIDE = 2


@dataclass(frozen=True)
class TokenBudget:
    """Square clips of a size drawn among those that the source has, 4k+1 frames, size^2 x frames below a budget."""

    sizes: tuple[int, ...] = (16, 32, 48)
    budget: int = 16 * 16 * 9
    share: float = 0.9  # of each clip, from its start

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(
            Bucket(f"{size}px", frames, "1:1", (frames, size, size), max(1, 8 // frames))
            for size in self.sizes
            for frames in range(1, self.most_frames(size) + 1, 4)
        )

    @cached_property
    def shapes(self) -> np.ndarray:
        return np.array([bucket.shape for bucket in self.buckets], np.int64)

    @property
    def entries(self) -> frozenset[tuple[str, int]]:
        return frozenset((bucket.resolution, bucket.num_frames) for bucket in self.buckets)

    def most_frames(self, size: int) -> int:
        return max(0, self.budget // size**2 - 1) // 4 * 4 + 1

    def assign_chunk(self, columns: Columns, draw: BucketDraw) -> tuple[np.ndarray, np.ndarray]:
        num_frames, height, width, _ = columns
        timing = self.timing(columns, draw)
        valid = np.isfinite(num_frames + height + width)
        room = np.where(valid, (timing.stop - timing.first) // STRIDE, 0)
        most = np.searchsorted(self.sizes, np.minimum(height, width), side="right")
        size = np.floor(draw(np.arange(len(most)), "size", 0, False) * most).astype(np.int64)
        caps = np.array([self.most_frames(size) for size in self.sizes])
        frames = (np.minimum(room, caps[np.minimum(size, len(caps) - 1)]) - 1) // 4 * 4 + 1
        places = {(bucket.shape[1], bucket.num_frames): index for index, bucket in enumerate(self.buckets)}
        code = np.array([places.get((self.sizes[s], f), -1) for s, f in zip(size, frames, strict=True)], np.int32)
        code = np.where(frames < 1, np.int32(Unused.TOO_SHORT), np.where(most < 1, np.int32(Unused.TOO_SMALL), code))
        return np.where(valid, code, np.int32(Unused.INVALID)).astype(np.int32), timing.interval

    def timing(self, columns: Columns, draw: BucketDraw) -> Timing:
        total = np.nan_to_num(columns[0])
        stop = np.where(total == 1, STRIDE, total * self.share).astype(np.int64)
        interval = np.full(len(total), STRIDE, np.int64)
        return Timing(columns[3] / STRIDE, interval, np.zeros(len(total), np.int64), stop)

    def content(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "budget": self.budget}

    def to_json(self) -> dict[str, Any]:
        return {KIND: "token budget", "sizes": list(self.sizes), "budget": self.budget, "share": self.share}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BucketLaw:
        return cls(tuple(data["sizes"]), data["budget"], data["share"])


register_law("token budget", TokenBudget.from_json)


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
