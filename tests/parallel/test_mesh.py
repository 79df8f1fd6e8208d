"""Degrees: which are taken, which are refused and in what words, and who is whose peer."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.contracts import UserError
from longtake.parallel.config import ParallelConfig, resolve_degrees
from tests.parallel.conftest import Worlds
from tests.ranks import Facts


@pytest.mark.parametrize(
    ("size", "given", "degrees"),
    [
        (8, {}, (1, 8, 1, 1)),
        (8, {"sequence": 2, "tensor": 2}, (1, 2, 2, 2)),
        (8, {"replicate": "auto", "shard": 2, "sequence": 2}, (2, 2, 2, 1)),
        (8, {"shard": 1, "sequence": "auto"}, (1, 1, 8, 1)),
        (8, {"shard": 4, "tensor": "auto"}, (1, 4, 1, 2)),
        (1, {"replicate": 1, "shard": 1, "sequence": 1, "tensor": 1}, (1, 1, 1, 1)),
    ],
)
def test_one_degree_follows_from_the_others(size: int, given: dict[str, Any], degrees: tuple[int, ...]) -> None:
    assert resolve_degrees(ParallelConfig(**given), size) == degrees


@pytest.mark.parametrize(
    ("size", "given", "said"),
    [
        (8, {"sequence": 3}, "parallel.sequence = 3: 8 processes do not divide by 3; choose one of 1, 2, 4, 8"),
        (
            8,
            {"sequence": 2, "tensor": 3},
            "parallel.sequence x parallel.tensor = 2 x 3: 8 processes do not divide by 6",
        ),
        (8, {"shard": 2, "sequence": 2}, '= 2 x 2: makes 4 ranks but 8 are running; choose shard = 4 or "auto"'),
        (8, {"shard": 2, "sequence": 3}, "makes 6 ranks but 8 are running; choose degrees whose product is that"),
    ],
)
def test_degrees_that_do_not_make_the_world_are_refused(size: int, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve_degrees(ParallelConfig(**given), size)
    assert said in str(refused.value)


def test_two_degrees_cannot_both_follow() -> None:
    with pytest.raises(ValueError, match=r"parallel\.shard and parallel\.sequence = \"auto\": only one"):
        ParallelConfig(sequence="auto")


@pytest.fixture
def facts(worlds: Worlds) -> list[Facts]:
    return worlds(4, "mesh")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("five heads", "parallel.tensor = 4: 5 attention heads do not divide by it; choose one of 1, 5"),
        ("uneven mlp", "parallel.tensor = 4: the 38 features of double_blocks.0.img_mlp.0 do not divide by it"),
        ("no block", "parallel.tensor = 2: needs a model with the block double_blocks.0"),
        ("ulysses alone", "parallel.sequence = 4: 2 attention heads do not divide by it; choose one of 1, 2, or"),
        ("two nodes", "tensor peers must lie in one node and this one runs 2 processes; choose one of 1, 2"),
    ],
)
def test_what_a_model_or_a_node_cannot_share_is_refused_on_every_rank(facts: list[Facts], name: str, said: str) -> None:
    assert all(said in found[name] for found in facts)


def test_peers_are_neighbours_and_the_weights_of_all_are_shared(facts: list[Facts]) -> None:
    assert [found["weights"] for found in facts] == [4] * 4
    assert [found["places"] for found in facts] == [[1, 0, 4, rank] for rank in range(4)]
    assert [found["whole"][0] for found in facts] == [[0, 1, 2, 3]] * 4
    assert [found["whole"][1] for found in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["whole"][2] for found in facts] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["whole"][3] for found in facts] == [None] * 4


def test_at_a_smaller_degree_peers_fall_into_neighbourhoods(facts: list[Facts]) -> None:
    assert [found["half"][0] for found in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["half"][2:] for found in facts] == [[None, None]] * 4


def test_peers_beyond_the_heads_make_a_ring_of_groups(facts: list[Facts]) -> None:
    assert [found["ring"] for found in facts] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
