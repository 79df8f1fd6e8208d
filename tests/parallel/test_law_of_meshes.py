"""Law 1: losses, gradients and one clipped optimizer step on every mesh are those of one process."""

from __future__ import annotations

from functools import partial

import pytest

from tests.parallel.conftest import Worlds
from tests.parallel.matrix import MATRIX, MESHES, WAYS
from tests.parallel.one_step import Facts, compare, on_ranks
from tests.parallel.plays import CASES

NAMES = [
    pytest.param(size, name, marks=[pytest.mark.slow] * (size > 2)) for size, cases in CASES.items() for name in cases
]


@pytest.mark.parametrize(("size", "name"), NAMES)
def test_a_step_on_every_mesh_is_that_of_one_process(worlds: Worlds, size: int, name: str) -> None:
    assert_one_step(worlds(size), name)


def assert_one_step(ranks: list[Facts], name: str) -> None:
    """Every rank found the step of one process."""
    for facts in ranks:
        far = facts["law"][name]
        assert far["loss"] <= 1e-5
        assert far["norm"] <= 1e-5
        assert far["gradient"] <= 1e-5
        assert far["weight"] <= 1e-6


@pytest.fixture(scope="module", params=MATRIX)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Facts]]:
    """A number of processes, and what these found out about all their meshes."""
    size = request.param
    return size, on_ranks(size, tmp_path_factory.mktemp(f"matrix{size}"), {"law": partial(compare, MATRIX[size])})


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_making_a_step_is_that_of_one_process_on_every_mesh(
    matrix: tuple[int, list[Facts]], way: str
) -> None:
    size, ranks = matrix
    for mesh in MESHES[size]:
        assert_one_step(ranks, f"{mesh}: {way}")


@pytest.mark.slow
def test_a_step_may_mix_sequence_degrees(worlds: Worlds) -> None:
    assert all(facts["forwards"]["degrees"] <= 1e-5 for facts in worlds(4))


def test_recomputation_knows_the_lengths_of_its_own_forward(worlds: Worlds) -> None:
    assert all(facts["forwards"]["two forwards"] <= 1e-5 for facts in worlds(4))


def test_offload_on_a_cpu_changes_nothing(worlds: Worlds) -> None:
    assert all(facts["forwards"]["offload"] <= 1e-5 for facts in worlds(4))
