"""Law 1: losses, gradients and one clipped optimizer step on every mesh are those of one process."""

from __future__ import annotations

import pytest

from tests.parallel.conftest import Worlds
from tests.parallel.matrix import CHOSEN, MATRIX
from tests.parallel.one_step import Facts
from tests.parallel.plays import CASES, COMPILED

NAMES = [
    pytest.param(size, name, marks=[pytest.mark.slow] * (size > 2)) for size, cases in CASES.items() for name in cases
]


@pytest.mark.parametrize(("size", "name"), NAMES)
def test_a_step_on_every_mesh_is_that_of_one_process(worlds: Worlds, size: int, name: str) -> None:
    assert_one_step(worlds(size, "law"), name)


def assert_one_step(ranks: list[Facts], name: str) -> None:
    """Every rank found the step of one process."""
    for facts in ranks:
        far = facts[name]
        assert far["loss"] <= 1e-5
        assert far["norm"] <= 1e-5
        assert far["gradient"] <= 1e-5
        assert far["weight"] <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_step_of_compiled_blocks_is_that_of_one_process(worlds: Worlds, name: str) -> None:
    assert_one_step(worlds(2, "compiled"), name)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CHOSEN.items() for name in cases])
def test_other_ways_of_making_a_step_are_that_of_one_process(worlds: Worlds, size: int, name: str) -> None:
    assert_one_step(worlds(size, "some ways"), name)


@pytest.mark.weekly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in MATRIX.items() for name in cases])
def test_every_way_of_making_a_step_is_that_of_one_process_on_every_mesh(worlds: Worlds, size: int, name: str) -> None:
    assert_one_step(worlds(size, "all ways"), name)


@pytest.mark.slow
def test_a_step_may_mix_sequence_degrees(worlds: Worlds) -> None:
    assert all(facts["degrees"] <= 1e-5 for facts in worlds(4, "degrees"))


def test_recomputation_knows_the_lengths_of_its_own_forward(worlds: Worlds) -> None:
    assert all(facts["two forwards"] <= 1e-5 for facts in worlds(4, "forwards"))


def test_offload_on_a_cpu_changes_nothing(worlds: Worlds) -> None:
    assert all(facts["offload"] <= 1e-5 for facts in worlds(4, "forwards"))
