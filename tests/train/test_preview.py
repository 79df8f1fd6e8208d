"""What a run would train on, counted without building it."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.train.preview import preview_buckets
from tests.plan.runs import run_config, write_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ten micro-batches of 8 frames and three of 16, as `run_config` has them."""
    return write_table(tmp_path, [(16, 64, 64)] * 6 + [(8, 64, 64)] * 40)


def previewed(table: Path, **changes: object) -> tuple[int, str]:
    """Steps of the first pass, and what they are said to be counted for."""
    found = preview_buckets(run_config(**changes), table)
    return found.report.num_steps, found.text().splitlines()[-1]


def test_steps_are_those_of_the_fewest_ranks_that_the_degrees_allow(table: Path) -> None:
    one = "steps of 1 slot, as 1 data rank would make them: n times as many make n times fewer"
    assert previewed(table) == (13, one)
    assert previewed(table, parallel={"sequence": 4}) == (13, one)
    steps, said = previewed(table, parallel={"replicate": 2}, accumulation_steps=3)
    assert (steps, said.split(":")[0]) == (3, "steps of 6 slots, as 2 data ranks would make them")


def test_steps_of_a_given_size_are_the_same_everywhere(table: Path) -> None:
    assert previewed(table, slots_per_step=5, parallel={"replicate": 2}) == (3, "steps of 5 slots")


def test_micro_batches_that_run_side_by_side_share_a_slot(table: Path) -> None:
    own = {"sequence": 4, "bucket_sequence": {"64px": {8: 1}}}
    steps, said = previewed(table, parallel=own)
    assert steps == 3 + 3
    assert said.endswith("; a slot holds 1 to 4 micro-batches, by its bucket's sequence degree")
    auto = {"sequence": 2, "bucket_sequence": "auto"}
    assert previewed(table, parallel=auto, bucket_config={"64px": {8: (1, 1), 16: (1, 2)}})[0] == 20 + 3


def test_degrees_that_do_not_fit_each_other_are_refused(table: Path) -> None:
    with pytest.raises(UserError, match=r"bucket_sequence.64px.8 = 3: does not divide parallel.sequence = 4"):
        previewed(table, parallel={"sequence": 4, "bucket_sequence": {"64px": {8: 3}}})
