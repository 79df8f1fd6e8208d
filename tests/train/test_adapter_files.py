"""Files of adapters beside a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.checkpoint.export import CheckpointWeights
from longtake.config.faults import ConfigError
from longtake.contracts import UserError
from longtake.system.pretrained import read_adapters_of
from longtake.train.adapter_files import own_names
from longtake.train.run_file import read_run
from longtake.weights.lora import read_adapters
from longtake.weights.mmdit import FORMAT
from tests.train.runs import train_here

FILES = "dict(comfy='checkpoint-{step}-comfy.safetensors', peft='checkpoint-{step}')"
LORA = ("--lora.rank", "2", "--lora.alpha", "8", "--lora_files", FILES, "--ckpt-every", "1", "--lr", "1e-2")


def beside(outputs: Path) -> list[str]:
    return sorted(path.name for path in outputs.glob("*checkpoint-*"))


def names_of(*steps: int) -> list[str]:
    return sorted(f"checkpoint-{step}{end}" for step in steps for end in ("", "-comfy.safetensors"))


@pytest.mark.parametrize("async_io", ["True", "False"])
def test_each_checkpoint_has_its_files_of_the_trained_strength(config: Path, async_io: str) -> None:
    outcome, _ = train_here(config, *LORA, "--max-steps", "3", "--keep-n-latest", "2", "--async-io", async_io)
    outputs = outcome.folder.parent
    assert beside(outputs) == names_of(2, 3)
    trained = read_adapters_of(CheckpointWeights(outcome.checkpoint, partly=True))
    model = read_run(str(outcome.folder)).value.model
    for name in ("checkpoint-3", "checkpoint-3-comfy.safetensors"):
        found = read_adapters(FORMAT, outputs / name, model)
        assert {adapter.scaling for adapter in found.values()} == {4.0}
        assert any(adapter.b.any() for adapter in found.values())
    found = read_adapters(FORMAT, outputs / "checkpoint-3", model)
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[layer].b, trained[layer].b) for layer in trained)


def test_files_of_rslora_say_an_alpha_that_means_the_same(config: Path) -> None:
    outcome, _ = train_here(config, *LORA, "--lora.rslora", "True", "--max-steps", "1")
    model = read_run(str(outcome.folder)).value.model
    for name in names_of(1):
        found = read_adapters(FORMAT, outcome.folder.parent / name, model)
        assert {round(adapter.scaling, 5) for adapter in found.values()} == {round(8 / 2**0.5, 5)}


def test_a_run_that_goes_on_writes_what_a_kill_has_left_out(config: Path) -> None:
    outcome, _ = train_here(config, *LORA, "--max-steps", "1")
    lost = outcome.folder.parent / "checkpoint-1-comfy.safetensors"
    lost.unlink()
    train_here(outcome.folder, "--max-steps", "2")
    assert beside(lost.parent) == names_of(1, 2)


def test_runs_in_one_folder_have_names_of_their_own_and_keep_them(tmp_path: Path) -> None:
    wanted = {"comfy": "a-{step}.safetensors"}
    first, second, third = (tmp_path / name for name in ("one", "two", "three"))
    for run in (first, second, third):
        run.mkdir()
    assert own_names(wanted, first) == wanted
    assert own_names(wanted, second) == {"comfy": "a-{step}-two.safetensors"}  # no file is there yet
    (tmp_path / "a-5.safetensors").touch()
    assert own_names(wanted, first) == wanted
    assert own_names(wanted | {"peft": "a-{step}"}, first) == wanted | {"peft": "a-{step}"}
    (tmp_path / "b-5").touch()
    assert own_names({"peft": "b-{step}"}, third) == {"peft": "b-{step}-three"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (LORA[4:6], "nothing trains adapters"),
        ((*LORA[:4], "--lora_files.kohya", "a-{step}.safetensors"), "lora_files.kohya: is no key"),
        ((*LORA[:4], "--lora_files.comfy", "a.safetensors"), "such as 'checkpoint-{step}.safetensors'"),
        ((*LORA[:4], "--lora_files.peft", "a-{step}.safetensors"), "such as 'checkpoint-{step}'"),
    ],
)
def test_names_that_cannot_be_are_refused(config: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("{", r"\{")):
        read_run(str(config), flags)


@pytest.mark.parametrize(
    ("targets", "flags", "named"),
    [
        ("['cond_in']", ("--model.cond-embed", "True"), "reaches cond_in"),
        ("['img_attn.q_proj']", ("--lora.dora", "True"), "joins layers of which DoRA has adapted only some"),
    ],
)
def test_target_that_a_style_cannot_hold_is_refused_before_the_first_step(
    targets: str, flags: tuple[str, ...], named: str, config: Path
) -> None:
    words = (*LORA[:4], "--lora_files.comfy", "a-{step}.safetensors", "--lora.targets", targets, "--max-steps", "1")
    with pytest.raises(UserError, match=named):
        train_here(config, *words, *flags, "--model.fused_qkv", "False")
    assert not list(config.parent.glob("**/epoch*"))
