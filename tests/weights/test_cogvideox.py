"""CogVideoX's files: every naming comes back, diffusers reads the folders, adapters of all styles are one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtake.contracts import Conditions, UserError
from longtake.models.cogvideox import CogVideoX
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.lora import AdapterSize, adapt, target_layers
from longtake.weights.adapters import merged, tensors_of
from longtake.weights.cogvideox import DIFFUSERS, FORMAT, SAT
from longtake.weights.conversion import ConvertedWeights, layer_names
from longtake.weights.files import save_weights
from longtake.weights.format import STEM_OF_DIFFUSERS, WeightLayout
from longtake.weights.lora import read_adapters, save_adapters
from longtake.weights.model import ModelWeights
from tests.models.golden_cogvideox import FOLDER, TINY, VARIANTS, golden_config, golden_model, tiny_config
from tests.weights.saved import save_model

LORA = FOLDER / "lora"


def random_model(config: CogVideoXConfig) -> CogVideoX:
    model = CogVideoX(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [WeightLayout("own"), DIFFUSERS, SAT], ids=lambda layout: layout.names)
def test_every_layout_round_trips_through_a_folder_in_parts(tmp_path: Path, variant: str, layout: WeightLayout) -> None:
    config = tiny_config(variant)
    state = random_model(config).state_dict()
    save_model(FORMAT, state, config, tmp_path / "w", layout, max_file_bytes=30_000)
    assert len(list((tmp_path / "w").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "w").glob("*.index.json"))) == 1
    found = ModelWeights(tmp_path / "w", config, FORMAT)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", ["t2v_2b", "i2v_5b", "i2v_1p5", "fun_inp_2b"])
def test_a_published_folder_comes_back_tensor_by_tensor(kind: str) -> None:
    model = golden_model(kind)
    written = ConvertedWeights(FORMAT, model.state_dict(), model.config, DIFFUSERS)
    read = load_file(FOLDER / "transformer" / kind / "diffusion_pytorch_model.safetensors")
    assert dict(written).keys() == read.keys()
    assert all(torch.equal(written[name], value.float()) for name, value in read.items())


def test_names_of_sat_are_converted_as_diffusers_converts_them() -> None:
    """The rules of diffusers' `convert_cogvideox_to_diffusers.py`, written out for the tensors that are joined."""
    config = tiny_config("1.5_i2v")
    state = random_model(config).state_dict()
    sat, ours = (ConvertedWeights(FORMAT, state, config, layout) for layout in (SAT, DIFFUSERS))
    for kind in ("weight", "bias"):
        joined = sat[f"transformer.layers.1.attention.query_key_value.{kind}"].chunk(3)
        for one, part in zip("qkv", joined, strict=True):
            assert torch.equal(part, ours[f"transformer_blocks.1.attn1.to_{one}.{kind}"])
        parts = sat[f"mixins.adaln_layer.adaLN_modulations.1.1.{kind}"].chunk(12)
        for norm, own in (("norm1", parts[0:3] + parts[6:9]), ("norm2", parts[3:6] + parts[9:12])):
            assert torch.equal(torch.cat(own), ours[f"transformer_blocks.1.{norm}.linear.{kind}"])
    for theirs, name in (
        ("mixins.adaln_layer.query_layernorm_list.1.weight", "transformer_blocks.1.attn1.norm_q.weight"),
        ("transformer.layers.0.post_attention_layernorm.bias", "transformer_blocks.0.norm2.norm.bias"),
        ("transformer.layers.0.mlp.dense_4h_to_h.weight", "transformer_blocks.0.ff.net.2.weight"),
        ("mixins.final_layer.adaLN_modulation.1.bias", "norm_out.linear.bias"),
        ("ofs_embed.2.weight", "ofs_embedding.linear_2.weight"),
        ("transformer.final_layernorm.weight", "norm_final.weight"),
    ):
        assert torch.equal(sat[theirs], ours[name])


@pytest.mark.parametrize("file", ["sat.safetensors", "1000/mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_sat_is_read_behind_its_prefix_without_its_tables(file: str, tmp_path: Path) -> None:
    config = tiny_config("2b")
    state = random_model(config).state_dict()
    tensors = dict(ConvertedWeights(FORMAT, state, config, SAT)) | {
        "mixins.pos_embed.pos_embedding": torch.zeros(1, 5, 32)
    }
    published = {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt":
        torch.save({"module": published, "iteration": 1000}, path)
        path = path.parent
    else:
        save_file(published, path)
    found = ModelWeights(path, config, FORMAT)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_input_channels_beyond_those_of_the_file_start_at_zero() -> None:
    config = golden_config("t2v_2b", visual="inpaint")
    weights = ModelWeights(FOLDER / "transformer" / "t2v_2b", config, FORMAT)
    expected = load_file(FOLDER / "transformer" / "expanded_patch_embed.safetensors")
    model = CogVideoX(config)
    model.load_state_dict(dict(weights))
    found = ConvertedWeights(FORMAT, model.state_dict(), config, DIFFUSERS)
    for name, value in expected.items():
        assert torch.equal(found[name], value.float())
    assert "fewer input channels" in weights.notes[0]
    assert weights.unread_known is not None


@pytest.mark.parametrize("patch_size_t", [None, 2])
def test_a_grown_model_answers_as_before_whatever_it_is_shown(patch_size_t: int | None, tmp_path: Path) -> None:
    sizes = TINY | {"patch_size_t": patch_size_t, "use_rotary_positional_embeddings": True}
    small = CogVideoXConfig(**sizes)
    model = random_model(small)
    for layout in (WeightLayout("own"), DIFFUSERS, SAT):
        save_model(FORMAT, model.state_dict(), small, tmp_path / layout.names, layout)
        grown = ModelWeights(tmp_path / layout.names, CogVideoXConfig(**sizes, visual="control"), FORMAT)
        weight = grown["patch_embed.proj.weight"]
        own = model.patch_embed["proj"].weight
        assert weight.shape[1] == 2 * own.shape[1]
        assert torch.equal(weight[:, : own.shape[1]], own)
        assert not weight[:, own.shape[1] :].any()


STYLES = ("kohya.safetensors", "peft_adapter", "diffusers/pytorch_lora_weights.safetensors")


@pytest.mark.parametrize("style", [*STYLES, "peft_injected.safetensors", "peft_injected_comfyui.safetensors"])
def test_adapters_of_every_style_merge_into_the_published_weights(style: str) -> None:
    """Files without alpha are of strength 1, as all readers take them."""
    model = golden_model("t2v_2b")
    adapters = read_adapters(FORMAT, LORA / style, model.config)
    assert len(adapters) == 12
    assert {adapter.scaling for adapter in adapters.values()} == {0.5 if style in STYLES else 1.0}
    if style not in STYLES:
        return
    state = {
        name: merged(value, adapters[layer]) if (layer := name.removesuffix(".weight")) in adapters else value
        for name, value in model.state_dict().items()
    }
    found = ConvertedWeights(FORMAT, state, model.config, DIFFUSERS)
    tensors = load_file(LORA / "merged.safetensors")
    expected = {n.removeprefix("merged."): value for n, value in tensors.items() if n.startswith("merged.")}
    assert len(expected) == 6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_an_adapted_model_answers_as_the_published_one_does() -> None:
    tensors = {
        name.removeprefix("forward."): value.float() for name, value in load_file(LORA / "merged.safetensors").items()
    }
    x, text = tensors["hidden_states"].transpose(1, 2), Conditions(text=tensors["encoder_hidden_states"])
    model = golden_model("t2v_2b")
    adapters = read_adapters(FORMAT, LORA / "kohya.safetensors", model.config)
    outputs = {"base": model(x, tensors["timestep"], text)}
    sizes = {name: AdapterSize(adapter.rank, adapter.scaling) for name, adapter in adapters.items()}
    adapt(model, sizes, "dense", torch.float32)
    model.load_state_dict(tensors_of(adapters), strict=False)
    outputs["with_lora"] = model(x, tensors["timestep"], text)
    for name, out in outputs.items():
        torch.testing.assert_close(out.transpose(1, 2), tensors[name], atol=2e-5, rtol=0)
    assert (tensors["with_lora"] - tensors["base"]).abs().max() > 1e-3


@pytest.mark.parametrize(("style", "published"), [("peft", STYLES[1]), ("diffusers", STYLES[2]), ("fun", STYLES[0])])
def test_adapters_are_written_as_the_libraries_write_them(style: str, published: str, tmp_path: Path) -> None:
    config = golden_config("t2v_2b")
    adapters = read_adapters(FORMAT, LORA / published, config)
    target = tmp_path / ("adapters" if style == "peft" else "adapters.safetensors")
    save_adapters(FORMAT, adapters, config, target, style)
    written, wanted = (
        load_file(path / "adapter_model.safetensors" if path.is_dir() else path) for path in (target, LORA / published)
    )
    assert written.keys() == wanted.keys()
    folded = 0.5 if style == "diffusers" else 1.0  # alpha / rank is in B
    assert all(torch.equal(written[n], wanted[n] * (folded if "lora_B" in n else 1)) for n in wanted)
    again = read_adapters(FORMAT, target, config)
    assert {layer: adapter.scaling for layer, adapter in again.items()} == dict.fromkeys(adapters, 0.5 / folded)


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "transformer.", "diffusion_model."])
@pytest.mark.parametrize("end", ["weight", "default.weight"])
def test_adapters_are_read_behind_any_prefix(prefix: str, end: str, tmp_path: Path) -> None:
    config = golden_config("t2v_2b")
    layers = {"transformer_blocks.0.attn1.to_out.0": (32, 32), "transformer_blocks.1.ff.net.0.proj": (128, 32)}
    tensors = {}
    for layer, (outs, ins) in layers.items():
        tensors[f"{prefix}{layer}.lora_A.{end}"] = torch.ones(4, ins)
        tensors[f"{prefix}{layer}.lora_B.{end}"] = torch.ones(outs, 4)
    save_file(tensors, tmp_path / "a.safetensors")
    found = read_adapters(FORMAT, tmp_path / "a.safetensors", config)
    assert sorted(found) == ["transformer_blocks.0.attn1.to_out", "transformer_blocks.1.ff.0"]


def test_a_kohya_file_without_alpha_tensors_may_say_it_in_its_header(tmp_path: Path) -> None:
    tensors = load_file(LORA / "peft_injected_comfyui.safetensors")
    for number, (header, scaling) in enumerate([({"ss_network_alpha": "2.0"}, 0.5), ({"ss_network_alpha": "None"}, 1)]):
        save_file(tensors, tmp_path / f"{number}.safetensors", header)
        found = read_adapters(FORMAT, tmp_path / f"{number}.safetensors", golden_config("t2v_2b"))
        assert {adapter.scaling for adapter in found.values()} == {scaling}


@pytest.mark.parametrize("shape", [(1, 32), (31, 1)])
def test_magnitudes_that_scale_columns_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    layer = "lora_unet__transformer_blocks_0_attn1_to_q"
    matrices = {f"{layer}.lora_down.weight": torch.ones(4, 32), f"{layer}.lora_up.weight": torch.ones(32, 4)}
    save_file(matrices | {f"{layer}.dora_scale": torch.ones(shape)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="the layer 32 rows; give a DoRA adapter that scales rows"):
        read_adapters(FORMAT, tmp_path / "a.safetensors", golden_config("t2v_2b"))


def test_adapters_of_sat_are_read(tmp_path: Path) -> None:
    config, tensors, layer = golden_config("t2v_2b"), {}, "model.diffusion_model.transformer.layers.1.attention"
    for number, name in enumerate(
        ("query_key_value.{}.0", "query_key_value.{}.1", "query_key_value.{}.2", "dense.{}.0")
    ):
        tensors[f"{layer}.{name.format('matrix_A')}"] = torch.full((4, 32), float(number))
        tensors[f"{layer}.{name.format('matrix_B')}"] = torch.ones(32, 4)
    save_file(tensors, tmp_path / "sat.safetensors")
    found = read_adapters(FORMAT, tmp_path / "sat.safetensors", config)
    expected = {f"transformer_blocks.1.attn1.to_{name}": n for n, name in enumerate(("q", "k", "v", "out"))}
    assert {layer: adapter.a[0, 0].item() for layer, adapter in found.items()} == expected


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("to_q", "to_k", "to_v", "ff.0", "ff.2"), 5),
        (("to_out.0", "ff.net.0.proj", "ff.net.2"), 3),
        (("attn1.to_out.0",), 1),
        (("ff.net",), 2),
        (("ff",), 2),
        (("ff.net.0",), 1),
        (("attn1", "norm1.linear"), 5),
        (None, 6),
    ],
)
def test_targets_are_understood_by_either_name(targets: Any, count: int) -> None:
    model = CogVideoX(tiny_config("2b"))
    assert len(target_layers(model, targets, FORMAT.lora_targets, layer_names(FORMAT, model.config))) == 2 * count


def test_targets_reach_the_layers_that_peft_reaches() -> None:
    model = golden_model("t2v_2b")
    names = layer_names(FORMAT, model.config)
    assert target_layers(model, ["linear_1"], (), names) == ["time_embedding.in_layer"]
    for row in json.loads((LORA / "report.json").read_text())["reached"]:
        if "ff.0" in row["targets"]:  # PEFT finds none, and CogVideoX-Fun's page means the MLPs
            continue
        reached = target_layers(model, row["targets"].split(","), (), names)
        assert {name for layer in reached for name in names[layer]} >= set(row["peft"])
        assert len(reached) == len(row["peft"])


def test_a_folder_says_what_it_is_and_diffusers_reads_it(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = tiny_config("5b")
    model = random_model(config)
    facts = json.dumps(FORMAT.folders["diffusers"](config))
    tensors = ConvertedWeights(FORMAT, model.state_dict(), config, DIFFUSERS)
    sizes = {"max_file_bytes": 60_000, "stem": STEM_OF_DIFFUSERS, "beside": {"config.json": facts}}
    save_weights(tensors, tmp_path / "w", **sizes)
    assert len(list((tmp_path / "w").glob("diffusion_pytorch_model-*.safetensors"))) > 1
    reference = diffusers.CogVideoXTransformer3DModel.from_pretrained(tmp_path / "w")
    assert all(torch.equal(value, tensors[name]) for name, value in reference.state_dict().items())
    again = CogVideoXConfig(from_pretrained=str(tmp_path / "w"))
    assert again.model_copy(update={"from_pretrained": None}) == config
