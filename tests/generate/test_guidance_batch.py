"""`sampling_option.guidance_batch`: branches of guidance as one batch or in turn, the same videos."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.generate import sample
from longtake.parallel.world import World
from longtake.system.build import System
from tests.encoders.conftest import described
from tests.generate.on_peers import make, make_mixed, tiny_system
from tests.precision import apart, system_in_float64
from tests.ranks import on_ranks

__all__ = ["described"]


def calls(system: System, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """A video, and the batch sizes of the model's forwards."""
    sizes: list[int] = []
    hook = system.denoiser.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    try:
        return make(system, "still", **options), sizes
    finally:
        hook.remove()


def test_in_turn_makes_the_video_of_one_batch(described: dict[str, Any], world: World) -> None:
    system = tiny_system(described, world)
    together, sizes = calls(system, guidance_batch=True)
    in_turn, single = calls(system, guidance_batch=False)
    assert (sizes, single) == ([2] * 3, [1] * 6)
    with system_in_float64(system):
        exact, _ = calls(system, guidance_batch=True)
    torch.testing.assert_close(in_turn, together, rtol=0, atol=apart(exact, together))


@pytest.mark.parametrize("fits", [True, False])
def test_auto_asks_whether_all_branches_fit(
    described: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    system, asked = tiny_system(described, world), []
    monkeypatch.setattr(sample, "fits_at_once", lambda system, samples, shape: asked.append((samples, shape)) or fits)
    _, sizes = calls(system)
    assert asked == [(2, (4, 1, 6, 16))]
    assert sizes == ([2] * 3 if fits else [1] * 6)


@pytest.mark.slow
def test_ranks_with_and_without_known_frames_wait_for_each_other(
    described: dict[str, Any], tmp_path: Path, world: World
) -> None:
    words = ("--sampling_option.guidance_batch", "False")
    folders = [tmp_path / "two", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    facts = on_ranks(2, folders[0], {"made": partial(mixed, described, folders[0], words)})
    first, second = (fact["made"]["calls"] for fact in facts)
    assert len(first) == len(second) == 9
    alone = make_mixed(described, folders[1], world, *words)["calls"]
    assert len(alone) == 9 + 6
    assert_same_videos(described, world, *folders)


def test_three_branches_at_once_make_the_video_of_three_in_turn(
    described: dict[str, Any], tmp_path: Path, world: World
) -> None:
    """Of known frames and of text alone."""
    folders = [tmp_path / "True", tmp_path / "False"]
    calls = []
    for folder in folders:
        folder.mkdir()
        words = ("--sampling_option.guidance_batch", folder.name)
        calls.append(make_mixed(described, folder, world, *words)["calls"])
    assert calls == [[3] * 3 + [2] * 3, [1] * (9 + 6)]
    assert_same_videos(described, world, *folders)


def assert_same_videos(described: dict[str, Any], world: World, *folders: Path) -> None:
    """Those of `make_mixed`, up to rounding."""
    exact_folder = folders[0] / "exact"
    exact_folder.mkdir()
    make_mixed(described, exact_folder, world, exact=True)
    for seed in (5, 6):
        exact, ours, theirs = (torch.load(folder / f"{seed}.pt") for folder in (exact_folder, *folders))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=apart(exact, theirs))


def mixed(described: dict[str, Any], folder: Path, words: tuple[str, ...], world: World) -> dict[str, Any]:
    return make_mixed(described, folder, world, *words)
