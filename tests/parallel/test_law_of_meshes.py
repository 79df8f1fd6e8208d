"""Law 1: losses, gradients and one clipped optimizer step on every mesh are those of one process."""

from __future__ import annotations

import pytest

from tests.parallel.conftest import Worlds
from tests.parallel.matrix import MATRIX, TABLES
from tests.parallel.one_step import assert_one_step
from tests.precision import within

WEEKLY = tuple(f"all ways of {family}" for family in MATRIX)


def steps_of(*tables: str) -> pytest.MarkDecorator:
    """Every step of these tables as a test's case; with more than two processes it is slow, if not weekly."""
    return pytest.mark.parametrize(
        ("table", "size", "name"),
        [
            pytest.param(
                table, size, name, marks=[pytest.mark.slow] * (size > 2 and table not in WEEKLY), id=f"{size}-{name}"
            )
            for table in tables
            for size, cases in TABLES[table].items()
            for name in cases
        ],
    )


@steps_of("law", "families")
def test_a_step_on_every_mesh_is_that_of_one_process(worlds: Worlds, table: str, size: int, name: str) -> None:
    assert_one_step(worlds(size, table), name)


@pytest.mark.slow
@steps_of("mixers", "some ways")
def test_other_ways_of_making_a_step_are_that_of_one_process(worlds: Worlds, table: str, size: int, name: str) -> None:
    assert_one_step(worlds(size, table), name)


@pytest.mark.slow
@steps_of("compiled")
def test_a_step_of_compiled_blocks_is_that_of_one_process(worlds: Worlds, table: str, size: int, name: str) -> None:
    """In one graph for each kind of block, exchanges and all."""
    ranks = worlds(size, table)
    assert_one_step(ranks, name)
    for facts in (found[name] for found in ranks):
        assert set(facts["compiled"].values()) == {1}
        assert (facts["graphs"], facts["breaks"]) == (len(facts["compiled"]), 0)


@pytest.mark.weekly
@pytest.mark.timeout(2400)
@steps_of(*WEEKLY)
def test_every_way_of_making_a_step_is_that_of_one_process_on_every_mesh(
    worlds: Worlds, table: str, size: int, name: str
) -> None:
    ranks = worlds(size, table)
    assert_one_step(ranks, name)
    if TABLES[table][size][name].compiled:
        assert all(facts[name]["graphs"] for facts in ranks)


@pytest.mark.slow
def test_a_step_may_mix_sequence_degrees(worlds: Worlds) -> None:
    assert all(within(facts["degrees"], 1e-5) for facts in worlds(4, "degrees"))


def test_recomputation_knows_the_lengths_of_its_own_forward(worlds: Worlds) -> None:
    assert all(within(facts["two forwards"], 1e-5) for facts in worlds(4, "forwards"))


def test_offload_on_a_cpu_changes_nothing(worlds: Worlds) -> None:
    assert all(within(facts["offload"], 1e-5) for facts in worlds(4, "forwards"))
