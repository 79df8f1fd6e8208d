"""`model.from_pretrained`: runs as sources of weights, in whatever layout, at whatever number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.mmdit import MMDiT
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.system.build import System, build_system
from longtake.system.pretrained import means_checkpoint
from longtake.train.run import Outcome
from longtake.train.run_file import read_run
from longtake.weights.files import save_weights
from longtake.weights.format import WeightLayout
from longtake.weights.mmdit import DIFFUSERS, FLUX, FORMAT, OPEN_SORA_V2
from longtake.weights.model import ModelWeights
from tests.test_hub import put
from tests.train.runs import assert_one_sentence, exact, finish, run_command, start, tensors, train_here, write_config
from tests.weights.saved import save_model

GROWN = ("--model.cond_embed", "True", "--model.grow_cond_in", "True")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Outcome:
    """A run of two steps with checkpoints of both. Nobody changes it."""
    config = write_config(tmp_path_factory.mktemp("trained"), clips)
    return train_here(config, "--exp_name", "t2v", "--max_steps", "2", "--ckpt_every", "1")[0]


def system_from(config: Path, source: object, *overrides: str) -> System:
    run = read_run(str(config), ("--model.from_pretrained", str(source), *overrides)).value
    with start_world("cpu") as world:
        return build_system(run, Mesh.create(run.parallel, world), world)


def weights_of(system: System) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in system.denoiser.named_parameters()}


def averages(checkpoint: Path) -> dict[str, Tensor]:
    return {name.removeprefix("ema."): t for name, t in tensors(checkpoint).items() if name.startswith("ema.")}


@pytest.mark.parametrize("kind", ["checkpoint", "run", "glob"])
def test_the_newest_averaged_weights_of_a_run_are_taken(config: Path, trained: Outcome, kind: str) -> None:
    source = {
        "checkpoint": trained.checkpoint,
        "run": trained.folder,
        "glob": trained.folder / "epoch*-global_step*",
    }[kind]
    system = system_from(config, source)
    found, saved = weights_of(system), averages(trained.checkpoint)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in found)
    assert system.notes == (f"weights: averaged (ema), from {trained.checkpoint}",)


def test_a_run_is_taken_over_by_a_model_of_another_layout(config: Path, trained: Outcome, tmp_path: Path) -> None:
    source = str(trained.checkpoint)
    changed = system_from(config, source, "--model.fused_qkv", "False", "--model.use_liger_rope", "False")
    state, model = weights_of(changed), changed.config.model
    save_model(FORMAT, state, model, tmp_path / "back.safetensors", WeightLayout("fused", "half"))
    back = ModelWeights(tmp_path / "back.safetensors", read_run(str(config)).value.model, FORMAT)
    saved = averages(trained.checkpoint)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)


def test_a_text_to_video_run_grows_into_an_image_to_video_one_and_says_so(config: Path, trained: Outcome) -> None:
    words = ("--model.from_pretrained", str(trained.folder), *GROWN, "--condition_config.i2v_head", "1")
    grown, said = train_here(config, "--exp_name", "i2v", "--max_steps", "1", *words)
    lines = [line.strip() for line in said.splitlines()]
    assert f"weights: averaged (ema), from {trained.checkpoint}" in lines
    assert f"{trained.checkpoint} has no cond_in: it starts at zero (model.grow_cond_in)" in lines
    assert "model.cond_in.weight" in tensors(grown.checkpoint)


def test_a_run_with_known_frames_is_no_source_for_one_without_unless_told(config: Path, trained: Outcome) -> None:
    words = ("--model.from_pretrained", str(trained.folder), *GROWN, "--condition_config.i2v_head", "1")
    grown, _ = train_here(config, "--exp_name", "source", "--max_steps", "1", *words)
    with pytest.raises(UserError, match=r"unknown cond_in\.bias, cond_in\.weight; it is an image-to-video model"):
        system_from(config, grown.folder)
    system = system_from(config, grown.folder, "--model.strict_load", "False")
    assert system.notes[1].endswith("unknown cond_in.bias, cond_in.weight; passed over (model.strict_load is False)")


def test_two_processes_start_from_the_weights_of_one(config: Path, trained: Outcome) -> None:
    words = ("--model.from_pretrained", trained.folder / "epoch*-global_step*", "--max_steps", "1")
    words = (*words, "--slots_per_step", "2", "--model.fused_qkv", "False")
    alone, _ = train_here(config, "--exp_name", "alone", *map(str, words))
    code, said, error = finish(start("train", config, "--exp_name", "both", *words, processes=2))
    assert code == 0, error
    assert "weights: averaged (ema), from" in said
    first, second = (float.fromhex(exact(alone.folder.parent / name)[0][2]) for name in ("alone", "both"))
    assert first == pytest.approx(second, rel=1e-5)


def test_a_foreign_file_says_where_it_is_from(config: Path, trained: Outcome, tmp_path: Path) -> None:
    model = read_run(str(config)).value.model
    save_model(FORMAT, averages(trained.checkpoint), model, tmp_path / "flux.safetensors", FLUX)
    system = system_from(config, tmp_path / "flux.safetensors")
    assert system.notes == (f"weights: from {tmp_path / 'flux.safetensors'}",)
    saved = averages(trained.checkpoint)
    assert all(torch.equal(value, saved[name]) for name, value in weights_of(system).items())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.from_pretrained", "gone.safetensors"), "gone.safetensors': no such file"),
        (("--model.from_pretrained", "{run}", "--model.guidance_embed", "True"), "does not fit the model: missing"),
        (("--ae", '{"_delete_": True, "type": "hunyuan_vae", "from_pretrained": "gone.safetensors"}'), "ae.from_pre"),
    ],
)
def test_files_are_looked_at_before_anything_that_takes_minutes(
    flags: tuple[str, ...], said: str, config: Path, trained: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.system.build.initialise_sharded", lambda *_: pytest.fail("values came first"))
    flags = tuple(flag.replace("{run}", str(trained.folder)) for flag in flags)
    run = read_run(str(config), (*flags, "--model.in_channels", "16") if "--ae" in flags else flags).value
    with start_world("cpu") as world, pytest.raises(UserError, match=said):
        build_system(run, Mesh.create(run.parallel, world), world)


def test_nothing_is_drawn_that_weights_or_a_checkpoint_will_fill(
    config: Path, trained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    real = MMDiT.initial_value
    monkeypatch.setattr(MMDiT, "initial_value", lambda self, name, *rest: drawn.append(name) or real(self, name, *rest))
    scratch = weights_of(system_from(config, None))
    assert set(drawn) == set(scratch)
    drawn.clear()
    system_from(config, trained.folder)
    train_here(trained.folder, "--max_steps", "2")
    assert not drawn
    partial = {name: scratch[name] + 1 for name in scratch if name != "img_in.bias"}
    save_weights(partial, tmp_path / "partial.safetensors", FORMAT.own(read_run(str(config)).value.model).header)
    found = weights_of(system_from(config, tmp_path / "partial.safetensors", "--model.strict_load", "False"))
    assert drawn == ["img_in.bias"]
    assert torch.equal(found["img_in.bias"], scratch["img_in.bias"])
    assert all(torch.equal(found[name], partial[name]) for name in partial)


def test_a_damaged_checkpoint_is_refused(config: Path, trained: Outcome, tmp_path: Path) -> None:
    run = shutil.copytree(trained.folder, tmp_path / "run")
    shard = next((run / trained.checkpoint.name).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match="checksum"):
        system_from(config, run / trained.checkpoint.name)


def test_a_checkpoint_away_from_its_run_is_refused(config: Path, trained: Outcome, tmp_path: Path) -> None:
    shutil.copytree(trained.checkpoint, tmp_path / trained.checkpoint.name)
    with pytest.raises(UserError, match=r"no config\.py beside the checkpoint"):
        system_from(config, tmp_path / trained.checkpoint.name)


def test_what_is_no_checkpoint_is_one_sentence(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not means_checkpoint(str(tmp_path / "gone.safetensors"))
    for source, said in ((tmp_path / "gone", "no such file or folder"), (tmp_path / "x*", "nothing is there")):
        code, _, error = run_command(capsys, ("train", config, "--model.from_pretrained", source, "--max_steps", "1"))
        assert_one_sentence(code, error, said)


def test_a_name_on_the_hub_is_found_in_its_cache_or_missed_in_one_sentence(
    config: Path, trained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = put(tmp_path / "cache", "owner/video")
    model, saved = read_run(str(config)).value.model, averages(trained.checkpoint)
    save_model(FORMAT, saved, model, folder / "small.safetensors", OPEN_SORA_V2)
    save_model(FORMAT, saved, model, folder / "transformer", DIFFUSERS)
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    for name, found in (("owner/video/small.safetensors", "small.safetensors"), ("owner/video", "transformer")):
        system = system_from(config, name)
        assert system.notes == (f"weights: from {folder / found}",)
        assert all(torch.equal(value, saved[name]) for name, value in weights_of(system).items())
    words = ("train", config, "--model.from_pretrained", "owner/video/gone.safetensors", "--max_steps", "1")
    code, _, error = run_command(capsys, words)
    assert_one_sentence(code, error, "model.from_pretrained = 'owner/video/gone.safetensors'", "run `hf download owner")


def test_a_run_of_a_part_is_a_source_of_whole_weights(config: Path, trained: Outcome) -> None:
    words = ("--model.from_pretrained", str(trained.checkpoint), "--train-only", '["final_layer"]', "--max_steps", "1")
    part, _ = train_here(config, "--exp_name", "part", *words)
    system = system_from(config, part.folder)
    assert system.notes == (
        f"weights: averaged (ema), from {part.checkpoint}; what it did not train, from {trained.checkpoint}",
    )
    found, before, own = weights_of(system), averages(trained.checkpoint), averages(part.checkpoint)
    assert own
    assert all(torch.equal(found[name], own.get(name, before[name])) for name in found)
