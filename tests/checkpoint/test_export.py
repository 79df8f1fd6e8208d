"""Taking the weights out of a checkpoint: one file or a folder of several, also beside a run that goes on."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors import safe_open
from safetensors.torch import load_file

from longtake.checkpoint import export as export_module
from longtake.checkpoint.runs import hold, resolve, retain
from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import UserError
from longtake.system.export import export_model, export_weights
from longtake.weights.files import MOST_FILE_BYTES, WeightFiles
from longtake.weights.model import ModelWeights
from longtake.weights.stdit3 import FORMAT
from tests.checkpoint.test_contents import EMA, TENSORS
from tests.models.golden_stdit3 import FOLDER as STDIT3
from tests.models.golden_stdit3 import golden_model
from tests.train.runs import finish, start, steps_saved, wait_until, write_config

STATE = RunState(Clock()).to_json()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "run", 0, 1, {**TENSORS, **EMA}, STATE)


@pytest.mark.parametrize("part", ["ema", "model"])
def test_an_export_is_one_file_of_plain_names_that_safetensors_reads(part, saved, tmp_path):
    target = export_weights(saved, tmp_path / "new" / "weights.safetensors", part, {"step": "1"})
    loaded = load_file(target)
    assert {f"{part}.{name}" for name in loaded} == {name for name in {**TENSORS, **EMA} if name.startswith(part)}
    for name, tensor in loaded.items():
        assert tensor.dtype == TENSORS[f"model.{name}"].dtype
        assert torch.equal(tensor, TENSORS[f"model.{name}"])
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "part": part, "step": "1"}
    assert [path.name for path in target.parent.iterdir()] == ["weights.safetensors"]


def test_without_an_ema_the_model_is_exported(tmp_path):
    saved = save_checkpoint(tmp_path, 0, 1, TENSORS, STATE)
    target = export_weights(saved, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(target)["a.weight"], TENSORS["model.a.weight"])
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["part"] == "model"


def test_export_of_averages_has_every_tensor_of_the_published_folder(tmp_path: Path) -> None:
    model = golden_model("base")
    state = {f"ema.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    saved = save_checkpoint(tmp_path / "run", 0, 1, state, STATE)
    (saved.parent / "config.py").write_text(f"model = {model.config.model_dump(mode='json')!r}\n", encoding="utf-8")
    published = load_file(STDIT3 / "stdit3_base_weights.safetensors")
    written = load_file(export_model(str(saved), tmp_path / "w.safetensors"))
    assert written.keys() == published.keys()
    torch.testing.assert_close(written["rope.freqs"], published["rope.freqs"], atol=1e-7, rtol=0)
    read = ModelWeights(tmp_path / "w.safetensors", model.config, FORMAT)
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())


def test_an_unknown_part_is_told(saved, tmp_path):
    with pytest.raises(UserError, match="has no part 'lora'; choose one of ema, model, optim"):
        export_weights(saved, tmp_path / "x.safetensors", "lora")


def linear_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])  # 288 bytes each


def test_a_folder_in_hugging_faces_layout_loads_through_its_own_library(tmp_path: Path) -> None:
    model = linear_layers()
    tensors = {f"ema.{name}": tensor for name, tensor in model.state_dict().items()}
    path = save_checkpoint(tmp_path / "run", 0, 1, tensors, STATE)
    folder = export_weights(path, tmp_path / "new" / "weights", max_file_bytes=600)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(p.name for p in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 288
    assert index["weight_map"].keys() == model.state_dict().keys()
    for name in names:
        held = load_file(folder / name)
        assert sum(tensor.nbytes for tensor in held.values()) <= 600
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == held.keys()
    other = linear_layers().requires_grad_(False)
    for parameter in other.parameters():
        parameter.zero_()
    load_torch_model(other, folder)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    files = WeightFiles(folder)
    assert all(torch.equal(files[name], tensor) for name, tensor in model.state_dict().items())
    assert [p.name for p in folder.parent.iterdir()] == ["weights"]


def test_a_small_model_in_a_folder_is_one_file_without_an_index(saved: Path, tmp_path: Path) -> None:
    folder = export_weights(saved, tmp_path / "weights", header={"step": "1"})
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "part": "ema", "step": "1"}


def test_a_folder_that_holds_something_is_not_written_into(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine").touch()
    with pytest.raises(UserError, match="weights: exists already and is not overwritten"):
        export_weights(saved, tmp_path / "weights")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["mine"]


@pytest.mark.parametrize("target", ["weights", "weights.safetensors"])
def test_of_an_export_that_is_cut_off_nothing_stays(
    target: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "assemble", full)
    with pytest.raises(OSError, match=r"No space left on device \(.* MB of .* MB were written, .*; make room"):
        export_weights(saved, tmp_path / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_checkpoint_that_is_read_is_not_removed_until_it_is_read(saved: Path) -> None:
    run = saved.parent
    for step in (2, 3):
        save_checkpoint(run, 0, step, TENSORS, STATE)
    with hold(saved) as folder:
        assert folder == saved
        assert [path.name for path in retain(run, 1)] == ["epoch0-global_step2"]
        assert saved.exists()
    assert retain(run, 1) == [saved]


def test_an_export_holds_what_it_reads(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(saved.parent, 0, 2, TENSORS, STATE)
    whole, removed = export_module.assemble, []

    def slowly(*args: object) -> torch.Tensor:
        thread = threading.Thread(target=lambda: removed.extend(retain(saved.parent, 1)))
        thread.start()
        thread.join()
        return whole(*args)

    monkeypatch.setattr(export_module, "assemble", slowly)
    monkeypatch.setattr("longtake.system.export.system_tree", lambda folder, prefix: {})
    target = export_model(str(saved), tmp_path / "weights.safetensors")
    assert removed == []
    assert len(load_file(target)) == len(EMA)


def test_what_was_removed_after_it_was_found_is_looked_for_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, found = saved.parent / "epoch0-global_step2", []

    def overtaken(spec: str | Path, outputs: str | Path) -> Path:
        found.append(resolve(spec, outputs))
        if len(found) == 1:
            save_checkpoint(saved.parent, 0, 2, TENSORS, STATE)
            retain(saved.parent, 1)
        return found[-1]

    monkeypatch.setattr("longtake.checkpoint.runs.resolve", overtaken)
    with hold(saved.parent) as folder:
        assert folder == newer
    assert found == [saved, newer]


def test_exports_beside_a_run_that_saves_every_step_are_whole(tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, ckpt_every=1, keep_n_latest=1, max_steps=100_000)
    run = tmp_path / "outputs" / "tiny"
    process = start("train", config)
    wait_until(process, lambda: bool(steps_saved(run)))
    for number in range(4):
        for part in ("ema", "model"):
            for target, limit in ((f"{number}-{part}.safetensors", MOST_FILE_BYTES), (f"{number}-{part}", 50_000)):
                files = WeightFiles(export_model(str(run), tmp_path / "out" / target, part, limit))
                assert files.metadata["part"] == part
                assert all(torch.isfinite(files[name]).all() for name in files)
    process.terminate()
    code, _, error = finish(process)
    assert code == 130, error
    assert len(steps_saved(run)) <= 2
    assert len(list((tmp_path / "out" / "0-ema").glob("model-*.safetensors"))) > 1
    first, last = (WeightFiles(tmp_path / "out" / f"{number}-model.safetensors") for number in (0, 3))
    assert any(not torch.equal(first[name], last[name]) for name in first)
