"""Families from outside the package do all that the built-in one does, with no line changed elsewhere."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from longtake.checkpoint.runs import list_checkpoints
from longtake.contracts import UserError
from longtake.families import registry
from longtake.families.registry import read_model, register
from longtake.models.build import build_denoiser
from longtake.parallel.world import World
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import Layout, MicroBatch
from longtake.plan.machine import Machine
from longtake.plan.memory import forecast_memory
from longtake.plan.remedies import refuse_misfits
from longtake.plan.run import plan_run
from longtake.plan.speed import forecast_time
from longtake.system.room import forward_bytes
from longtake.track.devices import gpu_named
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.families.everything import EVERYTHING
from tests.families.plain import PLAIN
from tests.families.runs import SIZES, registered, write_family
from tests.plan.trace import inputs, sampling_bytes, step_bytes
from tests.ranks import Facts, on_ranks
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, train_here

__all__ = ["clips", "longtake", "registered"]


@pytest.fixture(scope="module", params=sorted(SIZES))
def run(request: pytest.FixtureRequest, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), clips, request.param)


# For tests in which a family with everything has all that a plain one has.
PLAIN_IS_SLOW = pytest.mark.parametrize(
    "run", ["everything", pytest.param("plain", marks=pytest.mark.slow)], indirect=True
)


def test_an_installed_package_brings_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "my_family-0.1.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-family\nVersion: 0.1\n")
    (points := folder / "entry_points.txt").write_text("[longtake.families]\nmine = my_family:FAMILY\n")
    (tmp_path / "my_family.py").write_text("from tests.families.plain import PLAIN as FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(registry._FAMILIES, PLAIN.model)
    registry._load_installed.cache_clear()
    assert PLAIN in registry.families()
    points.write_text("[longtake.families]\nmine = my_family:NONE\n")
    registry._load_installed.cache_clear()
    with pytest.raises(UserError, match=r"the model family mine \(my_family:NONE\) cannot be loaded: AttributeError"):
        registry.families()


def test_it_trains_and_resumes_as_if_it_had_not_stopped(run: Path) -> None:
    whole, _ = train_here(run, "--exp_name", "whole", "--max_steps", "6")
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "3")
    train_here(cut.folder, "--max_steps", "6")
    assert exact(cut.folder) == exact(whole.folder)
    assert all(line["loss"] > 0 for line in metrics(whole.folder))
    assert [line.get("rates") for line in metrics(cut.folder)] == [line.get("rates") for line in metrics(whole.folder)]


def test_groups_of_parameters_have_rates_of_their_own_and_the_others_one_cycle(clips: Path, tmp_path: Path) -> None:
    outcome, said = train_here(write_family(tmp_path, clips, "everything"), "--max_steps", "5")
    one_cycle = pytest.approx([1e-4, 5.05e-3, 1e-2, 5.5e-3, 1e-3])
    expected = {"others": one_cycle, "null": [2e-3] * 5, "biases": one_cycle, "ends": [1e-3] * 5}
    expected["blocks"] = pytest.approx([4e-3, 3e-3, 2e-3, 1e-3, 0.0])
    rates = [line["rates"] for line in metrics(outcome.folder)]
    assert {name: [line[name] for line in rates] for name in rates[0]} == expected
    sizes = dict(re.findall(r"^learning rate of (\w+): (\d+) tensors", said, re.MULTILINE))
    inside = 2 * 9  # layers of two blocks
    assert {name: int(size) for name, size in sizes.items()} == {
        "others": 2,
        "null": 1,
        "biases": 4 + inside,
        "blocks": inside,
        "ends": 2,
    }


@pytest.fixture(scope="module")
def trained(run: Path) -> Path:
    return train_here(run, "--exp_name", "trained", "--max_steps", "2")[0].folder


def test_it_generates_from_a_run_and_from_an_export(longtake: Any, trained: Path, tmp_path: Path) -> None:
    words = ("--prompt", "a red circle moves left", "--save-dir", tmp_path / "of_run", "--num-steps", 3)
    assert longtake("generate", trained, *words)[0] == 0
    file = tmp_path / "weights.safetensors"
    assert longtake("checkpoint", "export", trained, file)[0] == 0
    (table := tmp_path / "prompts.csv").write_text(f"text,ref\n{words[1]},unused.png\n")
    code, out, _ = longtake("generate", file, "--prompts", table, "--save-dir", tmp_path / "of_file", *words[4:])
    reader = "this model" if "plain" in str(trained) else 'cond_type = "none"'
    assert (code, f"1 with a ref that {reader} does not use" in out) == (0, True)
    first, second = ([p.read_bytes() for p in (tmp_path / name).rglob("*.mp4")] for name in ("of_run", "of_file"))
    assert len(first) == 1
    assert first == second


@PLAIN_IS_SLOW
def test_a_run_from_a_store_is_the_run_that_encodes(longtake: Any, run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert longtake("data", "encode", run, "--dataset.views", 2, "-o", store)[0] == 0
    words = ("--max_steps", "3", "--dataset.views", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", *words, "--dataset.latents", str(store))
    assert exact(stored.folder) == exact(online.folder)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_it_trains_and_generates_in_bf16(longtake: Any, clips: Path, tmp_path: Path, name: str) -> None:
    run = write_family(tmp_path, clips, name, dtype="bf16", master_dtype="bf16")
    folder = train_here(run, "--max_steps", "2")[0].folder
    words = ("--prompt", "a sea", "--num-steps", 2, "--save-dir", tmp_path)
    code, _, err = longtake("generate", folder, *words)
    assert code == 0, err


def test_adapters_train_alone_and_are_exported(longtake: Any, run: Path, trained: Path, tmp_path: Path) -> None:
    words = ("--lora.rank", "2", "--max_steps", "2", "--outputs", str(tmp_path))
    words += ("--model.from_pretrained", str(trained))
    adapted, _ = train_here(run, "--exp_name", "adapted", *words)
    assert longtake("checkpoint", "export", adapted.folder, tmp_path / "adapters", "--lora", "peft")[0] == 0
    assert longtake("checkpoint", "export", adapted.folder, tmp_path / "merged.safetensors", "--merge")[0] == 0
    again, _ = train_here(run, "--exp_name", "again", *words, "--lora.from_pretrained", str(tmp_path / "adapters"))
    assert exact(again.folder) != exact(adapted.folder)


def test_it_is_made_tiny(run: Path) -> None:
    outcome, _ = train_here(run, "--exp_name", "tiny", "--max_steps", "1", "--tiny")
    assert len(list_checkpoints(outcome.folder)) == 1


def test_it_is_planned(longtake: Any, run: Path) -> None:
    code, out, err = longtake("plan", run, "--gpus", 1, "--gpu", "h100", "--model.grad_ckpt_settings=(1,)")
    assert code == 0, err
    assert "recomputed 1 layers blocks" in out
    config = read_run(str(run), ()).value
    plan = plan_run(config, 1, Machine(replace(gpu_named("h100"), memory_gib=1e-4), headroom=0))
    sizes = {entry.bucket.resolution for entry in plan.entries}
    assert sizes == ({"32px"} if config.family is PLAIN else {"16px", "32px"}), "a law of buckets of its own"
    assert plan.num_parameters == sum(p.numel() for p in build_denoiser(config.model).parameters())
    with pytest.raises(UserError, match="a micro-batch of"):
        refuse_misfits(plan)
    sizes = plan.work.micro_batch(plan.entries[0].bucket)
    brought = sizes.latent_bytes if config.model.type == "everything" else 0  # the control video, as latents
    bare = forecast_memory(config.model, replace(sizes, beside_bytes=0), plan.layout)
    assert forecast_memory(config.model, sizes, plan.layout).total - bare.total == sizes.beside_bytes == brought


@pytest.mark.parametrize("name", sorted(SIZES))
def test_what_a_step_takes_is_foretold_by_its_own_blocks(name: str) -> None:
    model = read_model({"model": {"type": name, "width": 256, "layers": 3}})
    latent, text, batch = (model.latent_channels, 9, 32, 32), 64, 16
    counted = step_bytes(model, latent[1:], text, batch=batch, remat=(1,))
    sizes, layout = MicroBatch(batch, latent, text), Layout(remat=(1,))
    said = forecast_memory(model, sizes, layout)
    assert said.total - said.optimizer == pytest.approx(counted["peak"], rel=0.05)
    sampling = sampling_bytes(model, latent[1:], text, batch=batch)
    assert max(forward_bytes(model, latent, text, batch).values()) == pytest.approx(sampling, rel=0.05)
    fused = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    }
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=fused) as counter:
        x, conditions = inputs(model, latent[1:], text, batch)
        build_denoiser(model)(x, torch.empty(batch), conditions)
    found = count_blocks(model, sizes, layout)
    assert found.forward.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    machine = Machine(gpu_named("h100"), efficiency=0.4, launch=0)
    seconds = (3 * found.forward.flops + found.blocks[0].forward.flops) / machine.rates.products
    assert forecast_time(model, sizes, layout, machine).compute == pytest.approx(seconds)


def test_degrees_that_it_has_no_plan_for_are_refused_in_a_sentence(longtake: Any, run: Path) -> None:
    code, _, err = longtake("plan", run, "--gpus", 2, "--parallel.tensor", 2)
    assert (code, err) == (2, "longtake: parallel.tensor = 2: this model has no plan for it; choose 1\n")


def losses_of(run: Path, words: tuple[str, ...], world: World) -> Facts:
    """The losses of a run of several processes; these know the families too."""
    register(PLAIN)
    register(EVERYTHING)
    config = read_run(str(run), words).value
    train(config, world, str(run), Console(file=io.StringIO()))
    return {"losses": [line["loss"] for line in metrics(Path(config.outputs) / config.exp_name)]}


@PLAIN_IS_SLOW
def test_peers_make_the_run_of_one_process(run: Path, tmp_path: Path) -> None:
    alone, _ = train_here(run, "--exp_name", "alone", "--max_steps", "2")
    words = ("--exp_name", "two", "--max_steps", "2", "--parallel.sequence", "2")
    first, second = on_ranks(2, tmp_path, {"peers": partial(losses_of, run, words)})
    assert first["peers"] == second["peers"]
    assert first["peers"]["losses"] == pytest.approx([line["loss"] for line in metrics(alone.folder)], rel=1e-5)
