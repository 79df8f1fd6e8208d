"""Choices of a launch: equal on all ranks, recorded, and valid on the machine that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import Bucket, UserError
from longtake.models.build import denoiser_class
from longtake.parallel.compile import BlockCompiler, missing_compiler
from longtake.parallel.recomputation import Level
from longtake.parallel.world import World, start_world
from longtake.plan.machine import FORECAST_ERROR
from longtake.plan.work import read_layout, read_work
from longtake.presets import find_preset
from longtake.train import choices as module
from longtake.train.choices import (
    Choices,
    settle_blocks,
)
from longtake.train.config import RunConfig
from longtake.train.folder import RunFolder
from longtake.train.run import RunLaunch
from longtake.train.run_file import read_run
from tests.plan.runs import run_config
from tests.train.runs import metrics, train_here

CHANGED = "the run's dtype, compile, mesh, model, encoders or buckets have changed"
BUCKETS = tuple(Bucket("32px", frames, "1:1", (frames, 32, 32), batch) for frames, batch in ((1, 4), (16, 2)))


@pytest.fixture
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


def on_gpus(monkeypatch: pytest.MonkeyPatch, world: World, *free_gib: float) -> World:
    """The world as one of GPUs with so much free memory, which have a compiler."""
    monkeypatch.setattr(module, "machine_facts", lambda device: {"device": "a GPU", "torch": "2.11"})
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_gib[0] * 2**30, 80 * 2**30))
    monkeypatch.setattr("longtake.system.build.missing_compiler", lambda device: None)
    monkeypatch.setattr(
        World, "gather", lambda self, own: [own, *((gib * 2**30, own[1]) for gib in free_gib[1:] if own)]
    )
    return replace(world, device=torch.device("cuda"))


BLOCKS = ["--compile", "auto", "--model.recompute", "auto"]


def settle(world: World, said: list[str], kept: dict | None = None, *words: str) -> tuple[RunConfig, dict, dict]:
    tiny = ["--tiny", "--dataset.data-path", "clips.csv", *BLOCKS, *words]
    config = read_run(str(find_preset("opensora_v2/stage2")), [*tiny, "--parallel.sequence", "1"]).value
    choices = Choices(world, kept or {}, said.append)
    return *settle_blocks(config, world, choices, said.append), choices.made


def test_the_cheapest_level_that_fits_is_chosen_for_each_entry_and_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config, levels, made = settle(on_gpus(monkeypatch, world, 8, 8), said)
    assert (config.compile, set(levels.values())) == (True, {"none"})
    state = RunState(Clock(), choices=made).to_json()
    room = made["levels"]["room"]
    assert room == int(8 * 2**30 * 0.92)
    layout = replace(read_layout(config, 1, 1), room=room)
    work = read_work(config)

    def needed(bucket: Bucket, level: Level) -> int:
        return work.memory(bucket, replace(layout, level=level), error=FORECAST_ERROR).total

    largest = max(work.entries, key=lambda bucket: needed(bucket, "none"))
    for level in ("selective", "full"):
        between = (needed(largest, level) + 1) / 0.92 / 2**30
        scarce = on_gpus(monkeypatch, world, 8, between)
        assert settle(scarce, said, state["choices"])[1] == levels
        said.clear()
        _, tight, found = settle(scarce, said)
        room = between * 0.92 * 2**30
        for bucket in work.entries:
            fitting = [one for one in ("none", "selective") if needed(bucket, one) <= room]
            assert tight[bucket.entry] == (fitting or ["full"])[0]
        assert tight[largest.entry] == level
        assert said[-1].startswith("model.recompute: ")
        assert f'"{level}" for ' in said[-1]
    state = RunState(Clock(), choices=found).to_json()
    assert settle(on_gpus(monkeypatch, world, 8, 8), said, json.loads(json.dumps(state))["choices"])[1] == tight
    scarce = on_gpus(monkeypatch, world, 8, between)
    store = "--dataset.latents", "store", "--dataset.views", "1"  # without encoders
    for words in (("--model.depth", "2"), store):
        said.clear()
        settle(scarce, said, state["choices"], *words)
        assert f"levels: chosen anew: {CHANGED}" in said


def test_two_deterministic_launches_have_the_same_levels_whatever_is_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled: what blocks save decides what is fused, and so how it rounds. Eager blocks compute the same."""
    scarce, repeats = 2**-7, ("--deterministic", "True")
    found, said = [], []
    for gib in (scarce, 8):
        found.append(settle(on_gpus(monkeypatch, world, gib, gib), said, None, *repeats))
        line = f"levels: for all a GPU has, as deterministic = True asks, though {gib:.1f} GiB are free"
        assert said[-1] == line
    assert found[0][1:] == found[1][1:]
    assert found[0][2]["levels"]["room"] == int(80 * 2**30 * 0.92)
    eager = *repeats, "--compile", "False"
    for words in ((), eager):
        assert settle(on_gpus(monkeypatch, world, scarce, scarce), said, None, *words)[1] != found[0][1]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"levels": [], "room": 1},
        {"levels": {"256px": {"many": "full"}}, "room": 1},
        {"levels": {"256px": {"1": "half"}}, "room": 1},
        {"levels": {"256px": {"1": ["full"]}}, "room": 1},
        {"levels": {"256px": {"1": "full"}}, "room": None},
    ],
)
def test_read_levels_forged_record_is_refused_in_one_sentence(record: dict) -> None:
    with pytest.raises(UserError, match=r"^run\.json: the record levels cannot be read \(.*\); remove it"):
        module.read_levels(record)


def test_a_wrong_level_is_refused_with_the_valid_ones() -> None:  # all kinds of denoisers have them
    words = ["--tiny", "--dataset.data-path", "clips.csv", "--model.recompute", "most"]
    with pytest.raises(UserError, match=r'model.recompute.*"none", "selective", "full", "auto"'):
        read_run(str(find_preset("opensora_v2/stage2")), words)


def test_without_a_compiler_blocks_run_eagerly_with_a_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    on_cpu, levels, made = settle(world, said)
    assert (on_cpu.compile, levels, made, said) == (False, {}, {}, [])
    cuda = on_gpus(monkeypatch, world, 8)
    monkeypatch.setattr("longtake.system.build.missing_compiler", missing_compiler)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: True)
    assert "does not run on this GPU" in str(missing_compiler(torch.device("cuda")))
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    assert not settle(cuda, said)[0].compile
    assert said[0] == (missing := "not compiled: Triton cannot be imported; pip install triton")
    asked_for = settle(cuda, [])[0].model_copy(update={"compile": True})
    said.clear()
    assert settle_blocks(asked_for, cuda, Choices(cuda, {}, said.append), said.append)[0].compile is False
    assert said[0] == missing
    in_float8 = asked_for.model_copy(update={"precision": "fp8"})
    with pytest.raises(UserError, match=r"; here Triton cannot be imported; pip install triton, or write"):
        settle_blocks(in_float8, cuda, Choices(cuda, {}, said.append), said.append)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_dynamic_follows_from_the_number_of_shapes_unless_it_is_given(
    world: World, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    monkeypatch.setattr(module, "compiles", lambda config, world: (config.compile, None))
    config = run_config(compile=True, bucket_config={"32px": {1: (1.0, 4), 4: (1.0, 2)}})
    buckets = config.bucket_rule.buckets
    tokens = denoiser_class(config.model).tokens
    shapes = {(one.batch_size, tokens(config.model, config.ae.latent(*one.shape))) for one in buckets}
    assert 2 < len(shapes) < len(buckets)  # ratios and their inverses are one shape
    monkeypatch.setattr(module, "STATIC_SHAPES", len(shapes) - dynamic)

    def settled(config: RunConfig, said: list[str]) -> bool | None:
        return settle_blocks(config, world, Choices(world, {}, said.append), said.append)[0].compile_dynamic

    assert settled(config, said := []) is dynamic
    rule = f"{'above' if dynamic else 'at most'} {len(shapes) - dynamic}"
    assert said[0] == f"compile_dynamic = {dynamic}: {len(shapes)} shapes (batch x tokens) of the bucket table, {rule}"
    assert settled(config.model_copy(update={"compile_dynamic": not dynamic}), said := []) is not dynamic
    assert settled(config.model_copy(update={"compile": False}), said) is None
    assert said == []


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_run_of_dynamic_sizes_trains_as_an_eager_one(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend="eager"))
    run = find_preset("opensora_v2/stage1")
    words = ["--tiny", "--dataset.data-path", str(clips), "--dtype", "fp32", "--ckpt-every", "1"]
    losses = {}
    for name, flags in {"eager": (), "compiled": ("--compile", "True", "--compile-dynamic", "True")}.items():
        outcome, _ = train_here(run, *words, "--outputs", str(tmp_path / name), "--max-steps", "1", *flags)
        losses[name] = [entry["loss"] for entry in metrics(outcome.folder)]
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-5)


def test_choices_saved_in_another_runs_checkpoint_are_not_taken(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = train_here(config, "--max_steps", "1")
    state = RunState.read(outcome.checkpoint)
    assert state.choices == {}
    run = read_run(str(outcome.folder), []).value
    chosen = {"graphs": {"static": [[1, 4]], "share": 1.0}}
    monkeypatch.setattr(RunState, "read", lambda checkpoint: replace(state, choices=chosen))
    with start_world("cpu") as world:
        for continues in (True, False):
            place = RunFolder(outcome.folder, outcome.checkpoint, continues)
            choices = RunLaunch(run, world, str(outcome.folder), Console()).choices(place)
            assert choices.made == (chosen if continues else {})
