"""Orders kept beside the table are those that planning gives, at any position, and are used only where they fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longtake.buckets import kept_orders
from longtake.buckets.dealing import step_digest
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.kept_orders import plan_kept
from longtake.buckets.order import PassOrder, plan_pass
from tests.buckets.tables import inputs, rule


@pytest.fixture(autouse=True)
def small_tables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_orders, "WORTH_KEEPING", 0)


def rest(order: PassOrder) -> tuple:
    steps = [step_digest(order.step(i)) for i in range(order.num_steps)]
    return order.report, steps, [order.state(i) for i in range(order.num_steps + 1)], order.num_samples


@pytest.mark.parametrize("weights", [1.0, 1.6])
def test_a_kept_order_goes_on_as_a_planned_one_and_plans_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: float
) -> None:
    def here() -> OrderInputs:
        return inputs(weights=weights)

    table, said = tmp_path / "clips.parquet", []
    whole = plan_pass(here(), 0)
    assert rest(plan_kept(here(), 0, None, table, said.append)) == rest(whole)
    changed = plan_pass(inputs(weights=weights, rule=rule(divisor=16)), 0, whole.state(3))
    plan_kept(inputs(weights=weights, rule=rule(divisor=16)), 0, whole.state(3), table, said.append)
    monkeypatch.setattr(kept_orders, "plan_from", None)
    for step in (0, 1, whole.num_steps // 2, whole.num_steps):
        state = whole.state(step)
        assert rest(plan_kept(here(), 0, state, table, said.append)) == rest(plan_pass(here(), 0, state))
    state = changed.state(2)
    found = plan_kept(inputs(weights=weights, rule=rule(divisor=16)), 0, state, table, said.append)
    assert rest(found) == rest(plan_pass(inputs(weights=weights, rule=rule(divisor=16)), 0, state))
    assert not said


def test_a_damaged_or_foreign_file_is_not_used_and_the_oldest_go(tmp_path: Path) -> None:
    table, said = tmp_path / "clips.parquet", []
    plan_kept(inputs(), 0, None, table, said.append)
    (kept,) = tmp_path.glob(".clips.parquet.*.order.npz")
    content = kept.read_bytes()
    places = [content.index(np.sort(plan_pass(inputs(), 0).keys)[5:6].tobytes()), len(content) // 2]
    entry, magic = content.index(b"PK\1\2"), content.index(b"\x93NUMPY")
    flips = ((places[0], 0), (entry + 8, 1), (entry + 10, 9), (entry + 46, 0), (magic + 60, ord("(")))
    flipped = [content[:place] + bytes([byte]) + content[place + 1 :] for place, byte in flips]
    for damaged in (content[:-100], b"", *flipped):
        kept.write_bytes(damaged)
        assert rest(plan_kept(inputs(), 0, None, table, said.append)) == rest(plan_pass(inputs(), 0))
        assert kept.read_bytes() == content
    for changed in ({"seed": 8}, {"slots_per_step": 2}, {"table_seed": 1}, {"weights": 2.0}, {"quarantined": {3: -1}}):
        found = plan_kept(inputs(**changed), 0, None, table, said.append)
        assert rest(found) == rest(plan_pass(inputs(**changed), 0))
    assert len(list(tmp_path.iterdir())) == kept_orders.MOST_KEPT
    assert not said


def test_where_nothing_can_be_written_a_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    found = plan_kept(inputs(), 0, None, tmp_path / "file" / "clips.parquet", said.append)
    assert rest(found) == rest(plan_pass(inputs(), 0))
    assert ["cannot be kept" in line for line in said] == [True]
