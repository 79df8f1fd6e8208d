"""One rank of a machine plans the pass, the others read it; errors reach them all."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtake.buckets.assignment import BucketRule
from longtake.buckets.dealing import step_digest
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import PassOrder
from longtake.contracts import UserError
from longtake.train import shared_order
from longtake.train.shared_order import plan_shared
from tests.train.runs import PATIENCE_SECONDS


@dataclass
class Meeting:
    """What the ranks of a thread world exchange their values through."""

    size: int
    barrier: threading.Barrier = field(init=False)
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)


@dataclass
class ThreadWorld:
    """The collectives of `World` between threads."""

    rank: int
    local_rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = [self.meeting.values[rank] for rank in range(self.size)]
        self.meeting.barrier.wait()
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def on_all(self, action: Callable[[], Any]) -> Any:
        result = error = None
        try:
            result = action()
        except Exception as found:
            error = found
        for found in self.gather(error):
            if found is not None:
                raise found
        return result


def made(num_clips: int = 100, **changes: Any) -> OrderInputs:
    rule = BucketRule.from_config({"32px": {1: (1.0, 3), 5: (0.7, 2)}}, 8)
    columns = {name: np.full(num_clips, value) for name, value in {"num_frames": 9, "height": 64, "width": 48}.items()}
    columns |= {"fps": np.full(num_clips, 24.0), "clip_ids": np.arange(num_clips, dtype=np.uint64)}
    return OrderInputs(seed=0, stage=0, slots_per_step=2, rule=rule, table="t", **columns | changes)


def on_ranks(local_ranks: list[int], inputs: OrderInputs) -> list[PassOrder | Exception]:
    meeting, found = Meeting(len(local_ranks)), [None] * len(local_ranks)

    def one(rank: int) -> None:
        try:
            found[rank] = plan_shared(inputs, 0, None, ThreadWorld(rank, local_ranks[rank], meeting))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(local_ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return found


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_order.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("local_ranks", [[0], [0, 1, 2], [0, 0]], ids=["alone", "one machine", "no local ranks"])
def test_every_rank_has_the_same_order_and_it_is_planned_once(
    local_ranks: list[int], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    planned = shared_order.plan_kept
    monkeypatch.setattr(shared_order, "plan_kept", lambda *args: plans.append(args) or planned(*args))
    orders = on_ranks(local_ranks, made())
    digests = [[step_digest(order.step(index)) for index in range(order.num_steps)] for order in orders]
    assert all(digest == digests[0] for digest in digests)
    assert len(digests[0]) > 5
    assert len(plans) == 1
    assert not list(temporary.iterdir())


def test_a_mistake_found_by_the_planning_rank_is_told_on_all(temporary: Path) -> None:
    errors = on_ranks([0, 1], made(height=np.full(100, 8)))
    assert all(isinstance(error, UserError) and "fits a bucket" in str(error) for error in errors)
    assert not list(temporary.iterdir())


def test_what_a_killed_planner_left_is_removed_but_not_what_a_living_one_holds(temporary: Path) -> None:
    left, held = temporary / "longtake-order-dead", temporary / "longtake-order-alive"
    for folder in (left, held):
        folder.mkdir()
        (folder / "planner.lock").touch()
        os.utime(folder / "planner.lock", (0, 0))
    with open(held / "planner.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        on_ranks([0, 1], made())
        assert list(temporary.iterdir()) == [held]
