from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from longtake.checkpoint import inspect
from longtake.config import dump_config
from longtake.contracts import UserError
from longtake.generate import load_weights, open_system, resolve_source
from longtake.parallel import World, local_tensor
from longtake.system import export_model
from longtake.train import Outcome


def weights(run: str, world: World, *flags: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that a generation from `run` would use, and what was said of them."""
    said: list[str] = []
    system = open_system(resolve_source(run, flags), world, said.append)
    return {name: local_tensor(p).clone() for name, p in system.denoiser.named_parameters()}, said


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_a_checkpoint_a_glob_and_latest_name_the_same_weights(
    run: Outcome, world: World, monkeypatch: pytest.MonkeyPatch
):
    expected, _ = weights(str(run.folder), world)
    monkeypatch.chdir(run.folder.parent.parent)
    for name in (str(run.checkpoint), f"{run.folder}*", f"{run.folder}/epoch*", "latest", "run"):
        assert resolve_source(name, []).checkpoint.resolve() == run.checkpoint.resolve()
    assert same(weights("latest", world)[0], expected)


def test_averaged_weights_are_the_default_and_raw_ones_the_choice(run: Outcome, world: World):
    averaged, said = weights(str(run.folder), world)
    raw, said_raw = weights(str(run.folder), world, "--ema", "False")
    assert not same(averaged, raw)
    assert "averaged (ema)" in said[0]
    assert "as trained" in said_raw[0]


def test_an_exported_file_is_enough_by_itself(run: Outcome, world: World, tmp_path: Path):
    for part, flags in (("ema", []), ("model", ["--ema", "False"])):
        file = export_model(str(run.folder), tmp_path / f"{part}.safetensors", part)
        assert same(weights(str(file), world)[0], weights(str(run.folder), world, *flags)[0])
    sampling = [resolve_source(str(place), []).config.sampling_option for place in (file, run.folder)]
    assert sampling[0] == sampling[1]


def test_a_config_file_takes_weights_from_a_file(run: Outcome, world: World, tmp_path: Path):
    file = export_model(str(run.folder), tmp_path / "w.safetensors")
    config = tmp_path / "sample.py"
    config.write_text(dump_config(resolve_source(str(run.folder), []).config))
    expected, _ = weights(str(run.folder), world)
    assert same(weights(str(config), world, "--model.from_pretrained", str(file))[0], expected)
    assert not same(weights(str(config), world)[0], expected)


def test_how_training_was_spread_out_does_not_bind_a_generation(run: Outcome, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    text = (folder / "config.py").read_text()
    assert "shard=" in text
    (folder / "config.py").write_text(text.replace('shard="auto"', "shard=8"))
    assert resolve_source(str(folder), []).config.parallel.shard == "auto"


def test_a_run_without_average_falls_back_to_its_weights(run: Outcome, world: World, monkeypatch: pytest.MonkeyPatch):
    def without_average(folder: Path) -> SimpleNamespace:
        rows = [row for row in inspect(folder).rows if row.part != "ema"]
        return SimpleNamespace(totals={row.part: None for row in rows}, rows=rows)

    monkeypatch.setattr("longtake.generate.source.inspect", without_average)
    source = resolve_source(str(run.folder), [])
    system = open_system(resolve_source(str(run.folder), ["--ema", "False"]), world, lambda text: None)
    assert load_weights(system, source.checkpoint, ema=True) == "model"


def test_what_is_no_source_is_refused_in_one_sentence(run: Outcome, tmp_path: Path):
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(2)}, foreign)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not safetensors")
    lonely = tmp_path / "lonely"
    shutil.copytree(run.checkpoint, lonely / run.checkpoint.name)
    cases = {
        str(foreign): "holds no Longtake config",
        str(broken): "cannot be read as safetensors",
        str(tmp_path / "gone.safetensors"): "No such file",
        str(tmp_path / "gone.py"): "gone.py",
        str(tmp_path / "gone"): "nothing is there",
        str(lonely): "no config.py beside the checkpoint",
    }
    for name, said in cases.items():
        with pytest.raises(UserError) as caught:
            resolve_source(name, [])
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_strength_is_refused_where_no_adapters_lie_upon_the_weights(run: Outcome, tmp_path: Path):
    file = export_model(str(run.folder), tmp_path / "w.safetensors")
    config = tmp_path / "sample.py"
    config.write_text(dump_config(resolve_source(str(run.folder), []).config))
    for source in (run.folder, file, config):
        for flags in (["--lora-scale", "0.5"], ["--lora-scale", "1"], ["--lora-scale", "0.5", "--tiny"]):
            with pytest.raises(UserError, match=r"lora\.strength = .* \(--lora\.strength\): there are no adapters"):
                resolve_source(str(source), flags)
        resolve_source(str(source), ["--lora", "a.safetensors", "--lora-scale", "0.5"])
    config.write_text(config.read_text() + "lora = dict(strength=0.5)\n")
    with pytest.raises(UserError, match=r"lora\.strength = 0\.5 \(.*sample\.py:\d+\): there are no adapters"):
        resolve_source(str(config), [])
