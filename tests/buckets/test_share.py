from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from longtake.buckets.order import open_order, order_summary, plan_pass, write_order
from tests.buckets.tables import inputs, rule
from tests.buckets.test_order import digests, through_json


@pytest.mark.parametrize("weights", [1.0, 2.4])
def test_an_order_read_from_files_is_the_order_that_was_written(tmp_path: Path, weights: float) -> None:
    made = inputs(400, weights=weights)
    order = plan_pass(made, 1, plan_pass(made, 1).state(3))
    write_order(order, tmp_path)
    opened = open_order(made, pickle.loads(pickle.dumps(order_summary(order))), tmp_path)
    shutil.rmtree(tmp_path)  # maps that are open outlive the files' names
    assert digests(opened) == digests(order)
    assert opened.report == order.report
    assert through_json(opened.state(4)) == through_json(order.state(4))
    assert isinstance(opened.order, np.memmap)


def test_an_order_without_steps_can_be_shared(tmp_path: Path) -> None:
    one = inputs(
        1, num_frames=np.ones(1), height=np.full(1, 40), width=np.full(1, 40), rule=rule({"32px": {1: (0.5, 1)}})
    )
    orders = [plan_pass(one, pass_index) for pass_index in range(20)]
    empty = next(order for order in orders if not order.num_steps)
    write_order(empty, tmp_path)
    assert open_order(one, order_summary(empty), tmp_path).num_steps == 0
