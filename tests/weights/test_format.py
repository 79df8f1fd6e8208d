"""What a format can tell of files, with a made-up model: everything that published files do otherwise than ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models.lora import target_layers
from longtake.weights.conversion import layer_names
from longtake.weights.files import save_weights
from longtake.weights.format import Form, Format, Growth, Naming, WeightLayout
from longtake.weights.lora import KOHYA, PEFT, read_adapters, save_adapters
from longtake.weights.model import ModelWeights
from tests.weights.saved import save_model

D, K = 4, 2


@dataclass(frozen=True)
class Section:
    DENOISER: ClassVar[str] = f"{__name__}:Denoiser"
    head_dim: int = K
    channels: int = 3
    grow_channels: bool = False
    strict_load: bool = True


class Denoiser(nn.Module):
    def __init__(self, config: Section) -> None:
        super().__init__()
        self.entry = nn.Conv3d(config.channels, D, (1, 2, 2), bias=False)
        self.empty = nn.Parameter(torch.zeros(5, D))  # of five words
        self.spatial = nn.ModuleList(Block() for _ in range(2))
        self.temporal = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(D, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))


def last_row_beyond(given: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    return torch.cat([given, given[-1:].expand(shape[0], -1)])[: shape[0]]


_PARTS = {f"{kind}.*.qkv": tuple(f"{kind}.*.{letter}" for letter in "qkv") for kind in ("spatial", "temporal")}
_CHANNELS = Growth(("entry.weight",), "fewer channels: the others start at zero", dims=(1,), key="grow_channels")
FORMAT = Format(
    name="toy",
    sources="a toy",
    namings={
        "images": Naming(  # an image model: no time, other names, another order of the outputs, no positions of ours
            {
                "pre.proj": "entry",
                "blocks.*": "spatial.*",
                "blocks.*.to_q": "spatial.*.q",
                "blocks.*.to_kv": ("spatial.*.k", "spatial.*.v"),
                "text.words": "empty",
            },
            signs=("blocks.*.to_q.weight", "text.words|text.null"),
            prefixes=("net.",),
            forms={
                "pre.proj.weight": Form(lambda config: (D, config.channels, 2, 2)),
                "last.weight": Form(lambda config: (6, D), lambda x, _: x.flip(0) / 2, lambda x, _: x.flip(0) * 2),
            },
            growths=(
                replace(_CHANNELS, tensors=("pre.proj.weight",)),
                Growth(("temporal.*",), "no time: its blocks are drawn", fill=None),
                Growth(("text.words",), "other words", fill=last_row_beyond, dims=(0,), cut=True),
            ),
            computed={"pos_*": None, "freqs": lambda config: torch.arange(config.head_dim)},
            note="an image model: expect a high first loss",
        ),
        "own": Naming(_PARTS, signs=("entry.weight",), growths=(_CHANNELS,)),
    },
    own=lambda config: WeightLayout("own", "half"),
    keys="model.channels",
    heads=("*.q.*", "*.k.*"),
    lora_targets=("spatial.*.qkv", "temporal.*.qkv"),
    lora_styles={"peft": PEFT, "kohya": replace(KOHYA, prefix="lora_unet__", names="images", lacks=("last",))},
)


def state_of(config: Section) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(value.shape) for name, value in Denoiser(config).state_dict().items()}


def image_file(channels: int = 3, words: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {
        "pre.proj.weight": (D, channels, 2, 2),
        "text.words": (words, D),
        "last.weight": (6, D),
        "last.bias": (6,),
    }
    for i in range(2):
        shapes |= {f"blocks.{i}.to_q.{k}": s for k, s in (("weight", (D, D)), ("bias", (D,)))}
        shapes |= {f"blocks.{i}.to_kv.{k}": s for k, s in (("weight", (2 * D, D)), ("bias", (2 * D,)))}
        shapes |= {f"blocks.{i}.mlp.{j}.{k}": s for j in (0, 2) for k, s in (("weight", (D, D)), ("bias", (D,)))}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_all_that_a_file_does_otherwise_is_undone(tmp_path: Path) -> None:
    file = image_file()
    there = {
        f"net.{name}": value for name, value in (file | {"pos_embed": torch.ones(9), "freqs": torch.ones(2)}).items()
    }
    save_weights(there, tmp_path / "images.safetensors")
    weights = ModelWeights(tmp_path / "images.safetensors", Section(), FORMAT)
    found = dict(weights)
    assert found.keys() == {name for name in Denoiser(Section()).state_dict() if not name.startswith("temporal")}
    assert torch.equal(found["entry.weight"], file["pre.proj.weight"][:, :, None])
    assert torch.equal(found["last.weight"], file["last.weight"].flip(0) / 2)
    assert torch.equal(found["spatial.1.mlp.2.bias"], file["blocks.1.mlp.2.bias"])
    half = [0, 2, 1, 3]  # of one head of four channels; here two heads of two, whose order is the same
    assert torch.equal(found["spatial.0.qkv.weight"][:D], file["blocks.0.to_q.weight"])
    assert torch.equal(found["spatial.0.qkv.weight"][D:], file["blocks.0.to_kv.weight"])
    four = ModelWeights(tmp_path / "images.safetensors", Section(head_dim=4), FORMAT)
    assert torch.equal(four["spatial.0.qkv.bias"][:D], file["blocks.0.to_q.bias"][half])
    assert torch.equal(four["spatial.0.qkv.bias"][2 * D :], file["blocks.0.to_kv.bias"][D:])
    place = tmp_path / "images.safetensors"
    assert weights.notes == [
        f"{place}: an image model: expect a high first loss",
        f"{place} has no time: its blocks are drawn",
    ]


@pytest.mark.parametrize(("words", "rows"), [(3, [0, 1, 2, 2, 2]), (7, [0, 1, 2, 3, 4])])
def test_a_table_made_for_another_size_is_cut_or_goes_on(words: int, rows: list[int], tmp_path: Path) -> None:
    file = image_file(words=words)
    save_weights(file, tmp_path)
    weights = ModelWeights(tmp_path, Section(), FORMAT)
    assert torch.equal(weights["empty"], file["text.words"][rows])
    assert f"{tmp_path} has other words" in weights.notes


def test_input_channels_grow_when_asked_to_and_never_shrink(tmp_path: Path) -> None:
    own = state_of(Section(channels=2))
    save_model(FORMAT, own, Section(channels=2), tmp_path / "own", WeightLayout("own", "half"))
    save_weights(image_file(channels=2), tmp_path / "images")
    for folder, given in (("own", own["entry.weight"]), ("images", image_file(2)["pre.proj.weight"][:, :, None])):
        grown = ModelWeights(tmp_path / folder, Section(grow_channels=True), FORMAT)
        assert torch.equal(grown["entry.weight"][:, :2], given)
        assert not grown["entry.weight"][:, 2:].any()
        assert f"{tmp_path / folder} has fewer channels: the others start at zero (model.grow_channels)" in grown.notes
        with pytest.raises(UserError, match=r"has shape \[4, 2, .*, the model needs \[4, 3, "):
            ModelWeights(tmp_path / folder, Section(), FORMAT)
        with pytest.raises(UserError, match="the model needs"):
            ModelWeights(tmp_path / folder, Section(channels=1, grow_channels=True), FORMAT)
    save_weights({name: value for name, value in image_file().items() if name != "pre.proj.weight"}, tmp_path / "none")
    with pytest.raises(UserError, match=r"missing pre\.proj\.weight"):
        ModelWeights(tmp_path / "none", Section(grow_channels=True), FORMAT)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("names", ["own", "images"])
def test_what_is_written_in_any_naming_comes_back(names: str, rope: str, tmp_path: Path) -> None:
    state = state_of(Section(head_dim=4))
    (file,) = save_model(FORMAT, state, Section(head_dim=4), tmp_path / "f.safetensors", WeightLayout(names, rope))
    found = ModelWeights(file, Section(head_dim=4), FORMAT)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert ("freqs" in found.files) == (names == "images")


def test_half_of_what_may_be_absent_and_mixed_names_are_faults(tmp_path: Path) -> None:
    name = "temporal.0.mlp.0.bias"
    save_weights(image_file() | {name: torch.zeros(D)}, tmp_path / "half")
    with pytest.raises(UserError, match=r"missing temporal\.{0\.\.1}\.k\.bias.*; change model\.channels to match"):
        ModelWeights(tmp_path / "half", Section(), FORMAT)
    save_weights(image_file() | {"spatial.0.qkv.bias": torch.zeros(3 * D)}, tmp_path / "mixed")
    with pytest.raises(UserError, match=r"mixes images tensors with own ones \(spatial\.0\.qkv\.bias\)"):
        ModelWeights(tmp_path / "mixed", Section(strict_load=False), FORMAT)
    save_weights({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(UserError, match=r"holds no toy weights \(no tensor blocks.* or entry.weight\); give a toy"):
        ModelWeights(tmp_path / "other", Section(), FORMAT)


def test_targets_are_names_in_the_model_and_in_files() -> None:
    model, names = Denoiser(Section()), layer_names(FORMAT, Section())
    assert target_layers(model, ["blocks.*.mlp.0"], (), names) == ["spatial.0.mlp.0", "spatial.1.mlp.0"]
    assert target_layers(model, ["to_q"], (), names) == ["spatial.0.qkv", "spatial.1.qkv"]
    assert len(target_layers(model, ["mlp"], (), names)) == 8
    with pytest.raises(UserError, match="'off' names no linear layer"):
        target_layers(model, ["off"], (), names)


SPELLINGS = {
    "blocks.1.to_q.lora_A.weight": "blocks.1.to_q.lora_B.weight",
    "transformer.blocks.1.to_q.lora_A.default.weight": "transformer.blocks.1.to_q.lora_B.default.weight",
    "diffusion_model.blocks.1.to_q.lora_down.weight": "diffusion_model.blocks.1.to_q.lora_up.weight",
    "lora_unet__blocks_1_to_q.lora_down.weight": "lora_unet__blocks_1_to_q.lora_up.weight",
    "lora_unet_blocks_1_to_q.lora_down.weight": "lora_unet_blocks_1_to_q.lora_up.weight",
    "model.diffusion_model.transformer.layers.1.attention.matrix_A.0": (
        "model.diffusion_model.transformer.layers.1.attention.matrix_B.0"
    ),
}


@pytest.mark.parametrize(("a", "b"), SPELLINGS.items())
def test_adapters_are_read_in_every_spelling(a: str, b: str, tmp_path: Path) -> None:
    sat = Naming({f"layers.*.attention.{i}": f"spatial.*.{part}" for i, part in enumerate("qkv")}, signs=())
    form = replace(FORMAT, namings={**FORMAT.namings, "sat": sat})
    torch.manual_seed(0)
    low, high = torch.randn(2, D), torch.randn(D, 2)
    save_file({a: low, b: high}, tmp_path / "a.safetensors")
    ((layer, found),) = read_adapters(form, tmp_path / "a.safetensors", Section()).items()
    assert (layer, found.scaling) == ("spatial.1.qkv", 1.0)
    assert torch.equal(found.b @ found.a, torch.cat([high @ low, torch.zeros(2 * D, D)]))
    if a.startswith("lora_unet__"):
        save_adapters(form, {layer: found}, Section(), tmp_path / "again.safetensors", "kohya")
        again = read_adapters(form, tmp_path / "again.safetensors", Section())
        torch.testing.assert_close(again[layer].b @ again[layer].a, found.b @ found.a)


def test_a_layer_in_another_form_takes_no_adapter_of_such_files(tmp_path: Path) -> None:
    save_file(
        {"last.lora_A.weight": torch.ones(1, D), "last.lora_B.weight": torch.ones(6, 1)}, tmp_path / "a.safetensors"
    )
    adapters = read_adapters(FORMAT, tmp_path / "a.safetensors", Section())
    assert adapters.keys() == {"last"}
    with pytest.raises(UserError, match="last: has another form in such files"):
        save_adapters(FORMAT, adapters, Section(), tmp_path / "b.safetensors", "kohya")
