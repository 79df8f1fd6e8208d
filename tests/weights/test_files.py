"""Safetensors as a mapping: what is written is read back, and what cannot be read says why."""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.contracts import UserError
from longtake.system.export import exported_tree
from longtake.weights.files import WeightFiles, save_weights


class Code:
    """Makes a file when a plain unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


STATE = {f"layer.{i}.weight": torch.full((4, 8), float(i)) for i in range(5)}


def test_one_file_comes_back_with_its_dtypes_and_metadata(tmp_path: Path) -> None:
    state = {"a": torch.randn(2, 3).bfloat16(), "b": torch.arange(4), "c": torch.randn(3, 2).T}
    assert save_weights(state, tmp_path / "w.safetensors", {"made": "here"}) == [tmp_path / "w.safetensors"]
    files = WeightFiles(tmp_path / "w.safetensors")
    assert set(files) == set(state)
    assert files.metadata["made"] == "here"
    assert files.shape("c") == (2, 3)
    for name, tensor in state.items():
        assert files[name].dtype == tensor.dtype
        assert torch.equal(files[name], tensor)


def test_shards_stay_within_their_bound_and_come_back_through_the_index(tmp_path: Path) -> None:
    written = save_weights(STATE, tmp_path, max_file_bytes=300)  # two tensors of 128 bytes each
    assert [file.name for file in written] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 128
    for place in (tmp_path, tmp_path / "model.safetensors.index.json"):
        files = WeightFiles(place)
        assert set(files) == set(STATE)
        assert all(torch.equal(files[name], STATE[name]) for name in STATE)
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_without_index_is_read_whole(tmp_path: Path) -> None:
    save_weights({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_weights({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    assert set(WeightFiles(tmp_path)) == {"a", "b"}


def test_tensors_in_one_memory_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    save_weights({"whole": whole, "rows": whole[1:3], "same": whole}, tmp_path)
    files = WeightFiles(tmp_path)
    assert torch.equal(files["rows"], whole[1:3])
    assert torch.equal(files["same"], whole)


def test_weights_are_never_overwritten(tmp_path: Path) -> None:
    for path in (tmp_path / "w.safetensors", tmp_path / "folder"):
        save_weights(STATE, path)
        with pytest.raises(UserError, match="not overwritten"):
            save_weights(STATE, path)


def damaged(tmp_path: Path, name: str) -> Path:
    """A place that cannot be read, by the name of what is wrong with it."""
    path = tmp_path / "w.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    match name:
        case "nothing there":
            return path
        case "pickle":
            path = tmp_path / "w.pt"
            path.write_bytes(pickle.dumps({"a": torch.ones(1), "b": Code(tmp_path / "ran")}, 2))
            return path
        case "no tensors in folder":
            return tmp_path
        case "cut off":
            save_weights(STATE, path)
            path.write_bytes(path.read_bytes()[:-40])
            return path
        case "not safetensors":
            path.write_bytes(b"\xff" * 100)
            return path
        case "same tensor twice":
            save_weights({"a": torch.ones(1)}, tmp_path / "1.safetensors")
            save_weights({"a": torch.ones(1)}, tmp_path / "2.safetensors")
            return tmp_path
        case "index without table":
            index.write_text("[1, 2]")
            return tmp_path
        case "index is not JSON":
            index.write_text("{")
            return tmp_path
        case "shard missing":
            index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
            return tmp_path
        case "shard outside":
            index.write_text(json.dumps({"weight_map": {"a": "../w.safetensors"}}))
            return tmp_path
        case "tensor missing":
            save_weights({"a": torch.ones(1)}, path)
            index.write_text(json.dumps({"weight_map": {"a": path.name, "b": path.name}}))
            return tmp_path
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing there", "no such file or folder"),
        ("pickle", "cannot be read as plain tensors, and code in it is not run"),
        ("no tensors in folder", "holds no .safetensors file"),
        ("cut off", "cannot be read as safetensors"),
        ("not safetensors", "cannot be read as safetensors"),
        ("same tensor twice", "the tensor a is in another file"),
        ("index without table", "is no index of weights"),
        ("index is not JSON", "is no index of weights"),
        ("shard missing", "names gone.safetensors, which is not there"),
        ("shard outside", "outside its own folder"),
        ("tensor missing", r"names 1 tensors that its files do not hold \(b"),
    ],
)
def test_what_cannot_be_read_says_why_in_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as fault:
        WeightFiles(damaged(tmp_path, name))
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "ran").exists()


def test_objects_in_a_file_of_the_old_form_are_passed_over(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "args": Namespace(lr=1), "code": Code(tmp_path / "ran")}
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert list(WeightFiles(tmp_path / "w.pth")) == ["w"]
    assert not (tmp_path / "ran").exists()


def test_tensors_that_pytorch_saved_are_read_by_name_without_what_is_beside_them(tmp_path: Path) -> None:
    beside = {"epoch": 3, "optimizer": {"step": torch.ones(1)}, "args": Namespace(place=Path("x"))}
    torch.save({"state_dict": STATE, **beside}, tmp_path / "w.pth")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    names = sorted(STATE)
    for number, own in ((1, names[:2]), (2, names[2:])):
        (tmp_path / "folder").mkdir(exist_ok=True)
        torch.save({name: STATE[name] for name in own}, tmp_path / "folder" / f"pytorch_model-0000{number}.bin")
    table = {name: f"pytorch_model-0000{1 + (name in names[2:])}.bin" for name in names}
    (tmp_path / "folder" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    for place in ("w.pth", "old.pt", "folder"):
        files = WeightFiles(tmp_path / place)
        assert sorted(files) == names
        assert files.shape(names[1]) == (4, 8)
        assert all(torch.equal(files[name], STATE[name]) for name in names)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model-00001.safetensors")
    for path in (tmp_path, tmp_path / "model-00001.safetensors"):
        with pytest.raises(UserError, match=r"regular file|no such file"):
            WeightFiles(path)
        with pytest.raises(UserError, match="regular file"):
            exported_tree(tmp_path / "model-00001.safetensors")
