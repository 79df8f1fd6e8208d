"""TTT-Video's files: every naming comes back, CogVideoX-5B starts a model, folders of PyTorch's run nothing."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from longtake.contracts import Conditions, UserError
from longtake.models.ttt_video import TTTVideo
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.weights.conversion import ConvertedWeights, state_shapes
from longtake.weights.format import WeightLayout
from longtake.weights.model import ModelWeights
from longtake.weights.torch_folder import METADATA, TorchFolder, save_torch_folder
from longtake.weights.ttt_video import FORMAT, PUBLISHED
from tests.models.golden_ttt_video import FOLDER, tiny_config
from tests.models.initialised import initialise
from tests.precision import within
from tests.weights.saved import save_model

OF_HF: dict[str, Any] = {"text_embed_dim": 24, "time_embed_dim": 16, "mini_batch_size": 2}


def golden_hf() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights by the names of diffusers, and what came of them."""
    tensors = load_file(FOLDER / "hf_conversion.safetensors")
    hf = {name.removeprefix("hf."): value for name, value in tensors.items() if name.startswith("hf.")}
    return hf, {name: value for name, value in tensors.items() if not name.startswith("hf.")}


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_cogvideox_5b_starts_a_model_as_published(kind: str, tmp_path: Path) -> None:
    hf, results = golden_hf()
    save_file(hf, tmp_path / "cogvideox.safetensors")
    config = tiny_config(kind, num_attention_heads=2, **{**OF_HF, "time_embed_dim": 16})
    weights = ModelWeights(tmp_path / "cogvideox.safetensors", config, FORMAT)
    assert any("no mixer" in note for note in weights.notes)
    model = TTTVideo(config)
    initialise(model, 0)
    found = {name: value.float() for name, value in weights.items()}
    assert model.load_state_dict(found, strict=False).unexpected_keys == []
    with torch.no_grad():
        for block in model.transformer_blocks:
            for gate in (*block.ttt.forward_gate.parameters(), *block.ttt.backward_gate.parameters()):
                gate.zero_()
    x, text = results["video"].float().transpose(1, 2), results["text"].float().unsqueeze(1)
    with torch.no_grad():
        out = model(x, results["timesteps"].float(), Conditions(text=text)).transpose(1, 2)
    far = float((out - results["out_reference"]).abs().max())
    assert within(far, 2e-5 * float(results["out_reference"].abs().max()))
    key_map = json.loads((FOLDER / "hf_key_map.json").read_text())
    converted = ConvertedWeights(FORMAT, model.state_dict(), config, PUBLISHED)
    for theirs, ours in key_map["map"].items():
        assert torch.equal(converted[ours.removeprefix("dit.")], hf[theirs].float()), ours
    new = {name.removeprefix("dit.") for name in key_map["not_in_hf"][f"ttt_{kind}"]}
    assert {f"dit.{name}" for name in converted.keys() - new} == set(key_map["map"].values())
    assert new <= converted.keys()


@pytest.mark.parametrize("size", ["5B", "debug"])
@pytest.mark.parametrize("mixer", ["ttt_linear", "ttt_mlp"])
def test_full_sizes_have_the_published_tensors(size: str, mixer: Any) -> None:
    sizes = {"num_layers": 6, "num_attention_heads": 8, "text_embed_dim": 512} if size == "debug" else {}
    config = TTTVideoConfig(mixer=mixer, **sizes)
    published = json.loads((FOLDER / "state_keys.json").read_text())[f"{size}.{mixer}"]
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in state_shapes(config).items()}
        found = {
            f"dit.{name}": list(value.shape)
            for name, value in ConvertedWeights(FORMAT, state, config, PUBLISHED).items()
        }
    assert sum(value.numel() for value in state.values()) == published["num_parameters"]
    assert len(found) == published["num_tensors"]
    starred = {re.sub(r"layers\.\d+\.", "layers.*.", name): shape for name, shape in found.items()}
    assert starred == {name: of["shape"] for name, of in published.items() if name.startswith("dit.")}


@pytest.mark.parametrize("names", ["own", "published"])
def test_every_layout_round_trips(tmp_path: Path, names: str) -> None:
    config = tiny_config()
    state = random_state(config)
    save_model(FORMAT, state, config, tmp_path / "w", WeightLayout(names))
    found = ModelWeights(tmp_path / "w", config, FORMAT)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("names", ["diffusers", "sat"])
def test_cogvideox_by_either_name_starts_all_but_the_mixer(tmp_path: Path, names: str) -> None:
    bare = tiny_config(mixer="none")
    state = random_state(bare)
    save_model(FORMAT, state, bare, tmp_path / "w", WeightLayout(names))
    found = ModelWeights(tmp_path / "w", tiny_config(), FORMAT)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("nested", [False, True])
def test_the_published_programs_folders_are_read(tmp_path: Path, nested: bool) -> None:
    """Flat, as its conversion writes them, or a training run's."""
    config = tiny_config("linear")
    state = random_state(config)
    dit = dict(ConvertedWeights(FORMAT, state, config, PUBLISHED))
    flat = {f"dit.{name}": value for name, value in dit.items()}
    saved: dict[str, Any] = flat
    if nested:
        saved = {"model": flat, "optimizer": {"step": torch.ones(3)}, "metadata": {"wandb_id": "abc"}}
    dcp.save(saved, checkpoint_id=tmp_path / "step-5", no_dist=True)
    found = ModelWeights(tmp_path / "step-5", config, FORMAT)
    assert found.layout.names == "published"
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_folder_written_here_is_read_by_the_published_program(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    converted = ConvertedWeights(FORMAT, state, config, PUBLISHED)
    save_torch_folder(converted, tmp_path / "out", "dit.", {"said.json": "{}"})
    target = {"dit": {name: torch.zeros_like(value) for name, value in converted.items()}}
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(target["dit"][name], value) for name, value in converted.items())
    assert (tmp_path / "out" / "said.json").read_text() == "{}"
    found = ModelWeights(tmp_path / "out", config, FORMAT)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_tensor_that_lies_in_parts_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    save_torch_folder({"0": whole[:1], "1": whole[1:]}, tmp_path / "out")
    metadata = pickle.loads((tmp_path / "out" / METADATA).read_bytes())
    chunks, places = [], {}
    for index, place in metadata.storage_data.items():
        offset = torch.Size([int(index.fqn), 0])
        chunks.append(ChunkStorageMetadata(offset, metadata.state_dict_metadata[index.fqn].size))
        places[MetadataIndex("a", offset)] = place
    properties = metadata.state_dict_metadata["0"].properties
    described = {"a": TensorStorageMetadata(properties, whole.size(), chunks)}
    (tmp_path / "out" / METADATA).write_bytes(pickle.dumps(Metadata(described, None, places)))
    assert torch.equal(TorchFolder(tmp_path / "out")["a"], whole)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_nothing_in_a_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_torch_folder({"a": torch.ones(2)}, tmp_path / "out")
    whole = (tmp_path / "out" / METADATA).read_bytes()
    for metadata, why in (
        (pickle.dumps(Evil()), "names pathlib"),
        (pickle.dumps(eval), "names builtins.eval"),
        (whole[:-20], "cannot be read"),
    ):
        (tmp_path / "out" / METADATA).write_bytes(metadata)
        with pytest.raises(UserError, match=why):
            TorchFolder(tmp_path / "out")
    (tmp_path / "out" / METADATA).write_bytes(whole)
    data = tmp_path / "out" / "__0_0.distcp"
    length = data.stat().st_size
    data.write_bytes(pickle.dumps(Evil()).ljust(length, b"."))
    with pytest.raises(UserError, match="a cannot be read"):
        TorchFolder(tmp_path / "out")["a"]
    assert not (tmp_path / "evil").exists()


def random_state(config: TTTVideoConfig) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in state_shapes(config).items()}
