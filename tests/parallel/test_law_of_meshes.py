"""Law 1: losses, gradients and one clipped optimizer step on every mesh are those of one process."""

from __future__ import annotations

import pytest

from tests.parallel.conftest import Worlds
from tests.parallel.plays import CASES

NAMES = [
    pytest.param(size, name, marks=[pytest.mark.slow] * (size > 4)) for size, cases in CASES.items() for name in cases
]


@pytest.mark.parametrize(("size", "name"), NAMES)
def test_a_step_on_every_mesh_is_that_of_one_process(worlds: Worlds, size: int, name: str) -> None:
    for facts in worlds(size):
        far = facts["law"][name]
        assert far["loss"] <= 1e-5
        assert far["norm"] <= 1e-5
        assert far["gradient"] <= 1e-5
        assert far["weight"] <= 1e-6


def test_a_step_may_mix_sequence_degrees(worlds: Worlds) -> None:
    assert all(facts["forwards"]["degrees"] <= 1e-5 for facts in worlds(4))


def test_recomputation_knows_the_lengths_of_its_own_forward(worlds: Worlds) -> None:
    assert all(facts["forwards"]["two forwards"] <= 1e-5 for facts in worlds(4))


def test_offload_on_a_cpu_changes_nothing(worlds: Worlds) -> None:
    assert all(facts["forwards"]["offload"] <= 1e-5 for facts in worlds(4))
