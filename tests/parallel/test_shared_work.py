"""Pieces of work dealt out over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from longtake.parallel.shared_work import RowShare, TileShare, deal
from longtake.parallel.world import World
from tests.ranks import Facts, on_ranks


@dataclass(frozen=True)
class Square:
    """n x n numbers i; counts who made them."""

    i: int
    n: int
    done: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.n

    def run(self) -> Tensor:
        self.done.append(self.i)
        return torch.full((self.n, self.n), float(self.i), dtype=torch.bfloat16)


@pytest.mark.parametrize(("costs", "ranks"), [([5, 1, 4, 2, 2], 2), ([1], 3), ([3] * 7, 3), ([], 2)])
def test_every_piece_has_one_rank_and_no_rank_more_than_a_piece_too_much(costs: list[int], ranks: int) -> None:
    owners = deal(costs, ranks)
    assert len(owners) == len(costs)
    load = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(costs, default=0)


def play(world: World) -> Facts:
    done: list[int] = []
    share = TileShare(lambda: torch.distributed.group.WORLD, torch.bfloat16, world.device)
    results = share([Square(i, n, done) for i, n in enumerate((3, 1, 2, 2, 1))])
    results[0][0, 0] = 9  # each rank's own
    return {"done": done, "sums": [float(result.sum()) for result in results]}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return on_ranks(2, tmp_path_factory.mktemp("pieces"), {"pieces": play, "rows": play_rows})


def test_each_rank_computes_its_own_and_has_all(played: list[Facts]) -> None:
    first, second = (facts["pieces"] for facts in played)
    assert first["sums"] == second["sums"] == [9, 1, 8, 12, 4]
    assert sorted(first["done"] + second["done"]) == [0, 1, 2, 3, 4]
    assert first["done"]
    assert second["done"]


def test_alone_nothing_is_sent() -> None:
    done: list[int] = []
    (result,) = TileShare(lambda: None, torch.bfloat16, torch.device("cpu"))([Square(4, 2, done)])
    assert (result.sum(), done) == (16, [4])


def play_rows(world: World) -> Facts:
    """Two ranks double 5 rows and 1: what each is asked for, and what each has."""
    asked: list[list[int]] = []

    def run(rows: Sequence[int]) -> Tensor:
        asked.append(list(rows))
        return torch.tensor([[2.0 * row] * 3 for row in rows], dtype=torch.bfloat16)

    share = partial(RowShare, lambda: torch.distributed.group.WORLD, torch.bfloat16, world.device)
    results = [share()(range(1, 1 + count), run, (3,)) for count in (5, 1)]
    share(every_rank=True)([7], run, (3,))
    return {"asked": asked, "results": [result[:, 1].tolist() for result in results]}


def test_rows_are_dealt_in_stretches_and_a_rank_without_one_stands_in_where_it_has_to(played: list[Facts]) -> None:
    first, second = (facts["rows"] for facts in played)
    assert first["results"] == second["results"] == [[2, 4, 6, 8, 10], [2]]
    assert first["asked"] == [[1, 2, 3], [1], [7]]
    assert second["asked"] == [[4, 5], [7]]


def test_alone_all_rows_are_run_at_once() -> None:
    share = RowShare(lambda: None, torch.float32, torch.device("cpu"))
    assert share([1.0, 2.0], lambda rows: torch.tensor(rows), ()).tolist() == [1, 2]
