"""Law 2 of peers whose compiled blocks are selective: a run that is started again is the run that never stopped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake.parallel.compile import BlockCompiler
from longtake.parallel.world import World
from longtake.presets import run_file
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.families.runs import write_scenes
from tests.ranks import Facts, on_ranks
from tests.train.runs import assert_same_bits, exact, write_config

STOPPED_AT, STEPS = 2, 4
EACH_TIME = "sequence peers", "sequence peers in float8"
SELECTIVE = {"attention": "sdpa", "recompute": "selective"}
SINGLE, BOTH = ({**SELECTIVE, "depth": depth} for depth in (0, 1))
WAYS = {  # what the config says, and its model
    "sequence peers": ({"parallel": {"sequence": 2}}, SINGLE),
    "tensor peers": ({"parallel": {"tensor": 2}}, BOTH),
    "adapters of a ring": (
        {"parallel": {"sequence": 2, "sequence_attention": "ring"}, "lora": {"rank": 2, "base": "int8"}},
        BOTH,
    ),
    "sequence peers in float8": (
        {"parallel": {"sequence": 2}, "precision": "fp8"},
        {**SINGLE, "hidden_size": 32, "axes_dim": (4, 6, 6)},  # float8 takes multiples of 16
    ),
}
PRESETS = ("opensora_v1_2/stage1", "cogvideox_fun/lora_5b", "ttt_video/ttt_mlp/9s")


def in_one_and_in_two(source: str, words: Sequence[str], world: World) -> Facts:
    """The folders of a run without a stop, and of one that began again in the middle, with nothing compiled yet."""

    def launch(source: str, steps: int, *words: str) -> str:
        torch._dynamo.reset()
        run = read_run(source, ["--max-steps", str(steps), *words]).value
        return str(train(run, world, source, Console(file=io.StringIO())).folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend="aot_eager"))
        whole = launch(source, STEPS, "--exp-name", "whole", *words)
        parts = launch(source, STOPPED_AT, "--exp-name", "parts", *words)
        parts = launch(parts, STEPS)
    return {"whole": whole, "parts": parts, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way in EACH_TIME else pytest.mark.weekly) for way in WAYS]
)
def test_compiled_selective_peers_go_on_bit_by_bit(tmp_path: Path, clips: Path, way: str) -> None:
    changes, model = WAYS[way]
    config = write_config(tmp_path, clips, dtype="bf16", compile=True, **changes)
    words = [word for key, value in model.items() for word in (f"--model.{key}", str(value))]
    assert_goes_on(str(config), words, tmp_path)


@pytest.mark.weekly
@pytest.mark.parametrize("peers", ["sequence", "tensor"])
@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_presets_of_the_other_families_go_on_bit_by_bit(
    tmp_path: Path, clips: Path, preset: str, peers: str
) -> None:
    if preset.startswith("ttt_video"):
        clips = write_scenes(tmp_path / "clips", 17, side=64)
    words = ["--tiny", "--dataset.data-path", str(clips), "--outputs", str(tmp_path), "--slots-per-step", "1"]
    words += ["--compile", "True", "--model.attention", "sdpa", "--model.recompute", "selective"]
    words += ["--parallel.replicate", "1", f"--parallel.{peers}", "2"]
    if "lora" in preset and peers == "tensor":  # who refuse adapters over quantised weights
        words += ["--lora.base", "dense"]
    assert_goes_on(str(run_file(preset)), words, tmp_path)


def assert_goes_on(source: str, words: Sequence[str], folder: Path) -> None:
    """A run of two peers that stops and resumes equals one that never stopped."""
    for facts in on_ranks(2, folder, {"run": partial(in_one_and_in_two, source, words)}):
        whole, parts = (Path(facts["run"][name]) for name in ("whole", "parts"))
        assert facts["run"]["graphs"] > 0
        assert exact(parts) == exact(whole)
        assert_same_bits(*(next(folder.glob(f"epoch*-global_step{STEPS}")) for folder in (parts, whole)))
