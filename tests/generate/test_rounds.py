"""Videos in rounds over the ranks: each once, by as many ranks as leave none idle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.generate.requests import plan_videos
from longtake.generate.rounds import batches_of, rounds, share_out
from longtake.generate.run import generate, open_system
from longtake.generate.source import GenerationSource, resolve_source
from longtake.parallel.config import divisors
from longtake.parallel.world import World
from tests.generate.on_peers import Facts, stir
from tests.generate.runs import keep_written
from tests.ranks import on_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = {
    "opensora_v2": "opensora_v2/inference/256px.py",
    "cogvideox_fun": "cogvideox_fun/inference/t2v.py",
    "opensora_v1_2": "opensora_v1_2/inference/240p.py",
    "ttt_video": "ttt_video/inference/ttt_mlp_9s.py",
}
PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_every_video_is_made_once_and_no_rank_idles(ranks: int) -> None:
    for count in range(1, 20):
        planned = list(rounds(count, ranks, divisors(ranks)))
        assert [number for numbers, _ in planned for number in numbers] == list(range(count))
        assert all(len(numbers) * degree == ranks for numbers, degree in planned)
        assert [degree for _, degree in planned[: count // ranks]] == [1] * (count // ranks)


def test_where_fewer_peers_are_allowed_the_last_round_alone_leaves_some_idle() -> None:
    assert list(rounds(11, 8, [1, 2])) == [(range(8), 1), (range(8, 11), 2)]
    assert list(rounds(3, 4, [2])) == [(range(2), 2), (range(2, 3), 2)]


def test_a_batch_is_smaller_where_ranks_would_go_without() -> None:
    assert [len(batch) for batch in batches_of(range(6), 4, 4)] == [1] * 6
    assert [len(batch) for batch in batches_of(range(9), 4, 2)] == [4, 4, 1]


def tiny(preset: str, folder: Path, *flags: str) -> GenerationSource:
    words = ["--tiny", "--num-steps", "2", "--dtype", "fp32", "--device", "cpu", "--prompt", str(PROMPTS)]
    return resolve_source(str(CONFIGS / preset), [*words, "--save-dir", str(folder), *flags])


def make(folder: Path, flags: tuple[str, ...], world: World) -> Facts:
    """The videos of all families, saved by rank and number, and the samples that each of the model's forwards had."""
    calls = {}
    with pytest.MonkeyPatch.context() as patch:
        written = keep_written(patch)
        for family, preset in PRESETS.items():
            calls[family] = made(tiny(preset, folder / family, *flags), world)
        np.savez(folder / f"rank{world.rank}.npz", **{str(path.relative_to(folder)): v for path, v in written.items()})
    return calls


def made(source: GenerationSource, world: World) -> list[int]:
    videos = plan_videos(source.config)
    said: list[str] = []
    parallel = share_out(source.config, videos, world, said.append)
    system = open_system(source, world, lambda line: None, parallel=parallel)
    stir(system.denoiser)
    calls: list[int] = []
    system.denoiser.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    assert not said
    generate(system, source.config, world, lambda line: None, videos=videos)
    return calls


@pytest.mark.slow
def test_two_ranks_make_the_videos_of_one_in_every_family(tmp_path: Path, world: World) -> None:
    folders = {name: tmp_path / name for name in ("two", "one", "in turn")}
    for folder in folders.values():
        folder.mkdir()
    first, second = (
        facts["made"] for facts in on_ranks(2, folders["two"], {"made": partial(make, folders["two"], ())})
    )
    assert first == second == dict.fromkeys(PRESETS, [2] * 4)  # two rounds, of two steps of two branches
    assert make(folders["one"], (), world) == dict.fromkeys(PRESETS, [2] * 6)
    in_turn = make(folders["in turn"], ("--sampling_option.guidance_batch", "False", "--start-index", "2"), world)
    assert in_turn == dict.fromkeys(PRESETS, [1] * 4)
    alone, apart, *shared = (
        np.load(file) for name in ("one", "in turn", "two") for file in sorted(folders[name].glob("*.npz"))
    )
    assert sorted(alone) == sorted(name for part in shared for name in part)
    for other in (apart, *shared):
        for name in other:
            assert np.abs(alone[name].astype(int) - other[name]).max() <= 1


def test_ranks_that_cannot_make_a_video_together_are_told(tmp_path: Path) -> None:
    config, said = tiny(PRESETS["ttt_video"], tmp_path).config, []
    videos = plan_videos(config)
    for size, degree in ((1, 1), (3, 1), (2, 2), (4, 4), (6, 2), (5, 1)):
        assert share_out(config, videos, World(0, size, 0, torch.device("cpu")), said.append).sequence == degree
    (line,) = said
    assert line.startswith("some of 5 processes wait at the end: parallel.sequence = 5: 8 heads do not divide by it")


def test_degrees_that_the_config_says_stay(tmp_path: Path) -> None:
    config = tiny(PRESETS["opensora_v2"], tmp_path, "--parallel.shard", "2").config
    assert share_out(config, plan_videos(config), World(0, 2, 0, torch.device("cpu")), print) is config.parallel
