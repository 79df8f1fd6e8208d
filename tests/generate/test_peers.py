"""One prompt over several processes: the same video as from one, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.parallel.world import start_world
from tests.encoders.conftest import described
from tests.generate.on_peers import SIZES, Facts, make_all, make_exact, tiny_system
from tests.precision import apart
from tests.ranks import on_ranks

__all__ = ["described"]
MESHES = {"sequence": ["--parallel.sequence", "2"], "tensor": ["--parallel.tensor", "2"]}


@pytest.fixture(scope="module")
def made(described: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Facts]]]:
    """The folder of all videos, and how many tiles each rank of two decoded."""
    folder, threads = tmp_path_factory.mktemp("peers"), torch.get_num_threads()
    play = partial(make_all, described, folder, MESHES)
    facts = [facts["made"] for facts in on_ranks(2, folder, {"made": play})]
    torch.set_num_threads(1)  # as many as each of the two had
    with start_world("cpu") as world:
        make_all(described, folder, {"alone": []}, world)
    yield folder, facts
    torch.set_num_threads(threads)


def videos(folder: Path, name: str) -> dict[str, Tensor]:
    return torch.load(folder / f"{name}.pt")


@pytest.fixture(scope="module")
def exact(described: dict[str, Any]) -> dict[str, Tensor]:
    return make_exact(described)


@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_make_the_video_of_one(
    made: tuple[Path, list[Facts]], exact: dict[str, Tensor], mesh: str
) -> None:
    alone, first, second = (videos(made[0], name) for name in ("alone-0", f"{mesh}-0", f"{mesh}-1"))
    assert {name: alone[name].shape[2:] for name in SIZES} == {
        "wide": (9, 48, 112),
        "still": (1, 48, 128),
        "square": (1, 80, 80),
    }
    for name, video in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], video, rtol=0, atol=apart(exact[name], video))


@pytest.mark.parametrize("mesh", MESHES)
def test_tiles_are_shared(made: tuple[Path, list[Facts]], mesh: str) -> None:
    counts = [facts[mesh] for facts in made[1]]
    assert sum(counts) == 2 * 5 + 2 * 6 + 4 * 4  # tiles of 32 pixels, 24 apart, at the three sizes
    assert abs(counts[0] - counts[1]) <= 2


def test_shared_tiles_are_bitwise_those_of_one(described: dict[str, Any], made: tuple[Path, list[Facts]]) -> None:
    with start_world("cpu") as world:
        system = tiny_system(described, world)
        for mesh in MESHES:
            shared = videos(made[0], f"{mesh}-0")
            assert torch.equal(system.encoders.posterior(shared["wide"])["mean"], shared["moments"])
