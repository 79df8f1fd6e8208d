"""Open-Sora 1.2's files: published folders come back, PixArt-Sigma is known by its tensors and starts a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import UserError, WeightsMisfit
from longtake.models.lora import AdapterSize, adapt, target_layers
from longtake.models.stdit3 import STDiT3
from longtake.models.stdit3_config import STDiT3Config, published_config
from longtake.weights.adapters import adapters_of, merged
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.lora import read_adapters, save_adapters
from longtake.weights.model import ModelWeights
from longtake.weights.stdit3 import FORMAT, PIXART
from tests.models.golden_stdit3 import FOLDER, golden_model, random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.precision import rounding
from tests.weights.saved import save_model

LOADING = json.loads((FOLDER / "pixart_loading.json").read_text())
OWN = FORMAT.as_published("published")


def test_a_published_file_comes_back_tensor_by_tensor() -> None:
    for kind in ("base", "small"):
        model = golden_model(kind)
        written = dict(ConvertedWeights(FORMAT, model.state_dict(), model.config, OWN))
        read = load_file(FOLDER / f"stdit3_{kind}_weights.safetensors")
        assert written.keys() == read.keys()
        for name, value in read.items():
            torch.testing.assert_close(written[name], value.float(), atol=1e-7 * (name == "rope.freqs"), rtol=0)


def test_a_folder_in_parts_says_what_model_it_is_of(tmp_path: Path) -> None:
    config = tiny_config(qk_norm=False, pred_sigma=False)
    model = STDiT3(config)
    initialise(model, 1)
    save_model(FORMAT, model.state_dict(), config, tmp_path / "w", OWN, max_file_bytes=20_000)
    (tmp_path / "w" / "config.json").write_text(json.dumps(published_config(config)))
    assert len(list((tmp_path / "w").glob("model-*.safetensors"))) > 1
    read = STDiT3Config(from_pretrained=str(tmp_path / "w"))
    assert read.model_copy(update={"from_pretrained": None}) == config
    found = ModelWeights(tmp_path / "w", read, FORMAT)
    assert not found.notes
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    (tmp_path / "w" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="is the config of llama, not of an STDiT3"):
        STDiT3Config(from_pretrained=str(tmp_path / "w"))


def pixart_file(case: dict[str, Any], folder: Path) -> Path:
    """The checkpoint of a golden case, as PyTorch wrote it."""
    tensors = load_file(FOLDER / "pixart_input.safetensors")
    extra = ("pos_embed*", "csize_embedder.*", "ar_embedder.*", "blocks.1.attn.sr.*")
    for name in list(tensors):
        like = next((one for one in extra if name.startswith(one.rstrip("*"))), None)
        if like is not None and like not in case["extra"]:
            del tensors[name]
    torch.save({"state_dict": tensors} if case["top_level_keys"] == ["state_dict"] else tensors, folder / case["file"])
    return folder / case["file"]


@pytest.mark.parametrize("number", range(len(LOADING["cases"])))
def test_pixart_is_loaded_as_published_whatever_its_file_is_called(number: int, tmp_path: Path) -> None:
    case = LOADING["cases"][number]
    like = case if number < 7 else LOADING["cases"][0]  # a name that the published program does not know
    config = STDiT3Config(
        **LOADING["model"], model_max_length=case["model_max_length"], depth=case["depth"], strict_load=number < 4
    )
    source = load_file(FOLDER / "pixart_input.safetensors")
    found = ModelWeights(pixart_file(case, tmp_path), config, FORMAT)
    state: dict[str, Tensor] = dict(found)
    assert state.keys() == like["loaded"].keys()
    assert {*STDiT3(config).state_dict(), "rope.freqs"} - state.keys() == set(like["missing"])
    for name, origin in like["loaded"].items():
        value = source[origin]
        if name == "y_embedder.y_embedding":
            rows = torch.arange(case["model_max_length"]).clamp(max=len(value) - 1)
            value = value[rows]
        assert torch.equal(state[name].view_as(value), value), name
    if number == 2:
        for name, value in load_file(FOLDER / "pixart_loaded.safetensors").items():
            assert torch.equal(state[name], value)


def test_what_pixart_lacks_is_told_and_changes_nothing_of_its_answers(tmp_path: Path) -> None:
    """Temporal blocks are identities and the frame rate adds nothing, so each frame is answered as a still."""
    config = STDiT3Config(**LOADING["model"], model_max_length=8, depth=2)
    found = ModelWeights(pixart_file(LOADING["cases"][0], tmp_path), config, FORMAT)
    said = "\n".join(found.notes)
    for words in (
        "has predicted noise",
        "no temporal blocks",
        "no norms of queries and keys",
        "no embedder of the frame",
    ):
        assert words in said
    model = STDiT3(config)
    initialise(model, 0)
    model.load_state_dict(dict(found), strict=False)
    x, t, conditions = random_inputs(config, (3, 4, 6))
    alone = [model(x[:, :, i : i + 1], t, conditions.updated(fps=torch.full((2,), 120.0))) for i in range(3)]
    together = model(x, t, conditions)
    bound = rounding(float(together.abs().max()), steps=config.hidden_size)  # of the sums over channels
    torch.testing.assert_close(together, torch.cat(alone, 2), atol=bound, rtol=0)


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = STDiT3Config(**LOADING["model"], model_max_length=8, depth=3)
    with pytest.raises(WeightsMisfit, match=r"missing blocks\.2\..*change model\.depth or qk_norm"):
        ModelWeights(pixart_file(LOADING["cases"][0], tmp_path), config, FORMAT)
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="holds no STDiT3 weights"):
        ModelWeights(tmp_path / "w.pth", config, FORMAT)


def test_a_model_can_be_written_as_pixart_reads_it(tmp_path: Path) -> None:
    """The spatial half; what is temporal stays under its own names."""
    model = golden_model("base")
    written = ConvertedWeights(FORMAT, model.state_dict(), model.config, PIXART)
    assert written["x_embedder.proj.weight"].shape == (40, 4, 2, 2)
    assert torch.equal(written["blocks.1.attn.qkv.weight"], model.spatial_blocks[1].attn.qkv.weight)


def test_adapters_come_back_and_merge(tmp_path: Path) -> None:
    config = tiny_config()
    model = STDiT3(config)
    initialise(model, 0)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    names = target_layers(model, None, FORMAT.lora_targets)
    assert len(names) == 7 * 2 * config.depth
    adapt(model, dict.fromkeys(names, AdapterSize(2, 0.5)), "dense", torch.float32)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found = adapters_of(dict(model.named_parameters()), 0.5)
    save_adapters(FORMAT, found, config, tmp_path / "peft", "peft", None)
    read = read_adapters(FORMAT, tmp_path / "peft", config)
    assert read.keys() == found.keys()
    x, t, conditions = random_inputs(config)
    plain = STDiT3(config)
    for layer, adapter in read.items():
        base[f"{layer}.weight"] = merged(base[f"{layer}.weight"], adapter)
    plain.load_state_dict(base)
    torch.testing.assert_close(plain(x, t, conditions), model(x, t, conditions), atol=1e-5, rtol=0)
