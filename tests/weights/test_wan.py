"""Wan's files: every naming comes back, diffusers reads the folders, adapters of all trainers are one."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from longtake.contracts import UserError, WeightsMisfit
from longtake.models.lora import AdapterSize, adapt
from longtake.models.wan import Wan
from longtake.models.wan_config import WanConfig
from longtake.weights.adapters import Adapters, tensors_of
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import save_weights
from longtake.weights.format import STEM_OF_DIFFUSERS, WeightLayout
from longtake.weights.lora import read_adapters, save_adapters
from longtake.weights.model import ModelWeights
from longtake.weights.wan import DIFFUSERS, FORMAT, OFFICIAL
from tests.models.golden_wan import (
    FOLDER,
    KINDS,
    VARIANTS,
    golden_config,
    golden_model,
    golden_weights,
    inputs_of,
    read_golden,
    tiny_config,
)
from tests.weights.saved import save_model

KEYS = json.loads((FOLDER / "keys" / "transformer.json").read_text())
OWN = WeightLayout("own")


def random_model(config: WanConfig) -> Wan:
    model = Wan(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [OWN, DIFFUSERS, OFFICIAL], ids=lambda layout: layout.names)
def test_every_layout_round_trips_through_a_folder_in_parts(tmp_path: Path, variant: str, layout: WeightLayout) -> None:
    config = tiny_config(variant)
    state = random_model(config).state_dict()
    save_model(FORMAT, state, config, tmp_path / "w", layout, max_file_bytes=20_000)
    assert len(list((tmp_path / "w").glob("*.index.json"))) == 1
    found = ModelWeights(tmp_path / "w", config, FORMAT)
    assert found.layout.names == layout.names
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_names_and_shapes_are_those_of_the_published_files() -> None:
    for name in ("Wan2.1-T2V-1.3B", "Wan2.1-FLF2V-14B"):
        facts, rows = KEYS["real_models"][name], [r for r in KEYS["one_block_and_the_rest"] if r["model"] == name]
        config = WanConfig(**{key: facts[key] for key in facts if key in WanConfig.model_fields} | {"num_layers": 1})
        with torch.device("meta"):
            state = Wan(config).state_dict()
        for layout, key in ((OFFICIAL, "official"), (DIFFUSERS, "diffusers")):
            found = ConvertedWeights(FORMAT, state, config, layout)
            assert {n: list(tensor.shape) for n, tensor in found.items()} == {row[key]: row["shape"] for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_comes_back_tensor_by_tensor(kind: str) -> None:
    model, read = golden_model(kind), golden_weights(kind)
    written = ConvertedWeights(FORMAT, model.state_dict(), model.config, DIFFUSERS)
    assert dict(written).keys() == read.keys()
    assert all(torch.equal(written[name], value) for name, value in read.items())


@pytest.mark.parametrize("layout", [OFFICIAL, DIFFUSERS], ids=lambda layout: layout.names)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_states_its_config(tmp_path: Path, variant: str, layout: WeightLayout) -> None:
    """Of official image-to-video folders the layers state whether CLIP tokens are read: configs are alike."""
    clip = {"image_dim": 1280} if variant == "i2v_clip" else {}
    if variant == "ti2v":
        clip = {"in_channels": 48, "out_channels": 48}
    config = tiny_config(variant, text_dim=4096, text_len=512, **clip)
    model = random_model(config)
    facts = json.dumps(FORMAT.folders[layout.names](config))
    tensors = ConvertedWeights(FORMAT, model.state_dict(), config, layout)
    for parts, size in (("whole", 10**9), ("parts", 400_000)):
        folder = tmp_path / parts
        save_weights(tensors, folder, max_file_bytes=size, stem=STEM_OF_DIFFUSERS, beside={"config.json": facts})
        read = WanConfig(from_pretrained=str(folder))
        assert read.model_copy(update={"from_pretrained": None}) == config
        assert ModelWeights(folder, read, FORMAT).keys() == model.state_dict().keys()
    if layout == DIFFUSERS:
        diffusers = pytest.importorskip("diffusers")
        reference = diffusers.WanTransformer3DModel.from_pretrained(folder)
        assert all(torch.equal(value, tensors[name]) for name, value in reference.state_dict().items())


def test_a_single_file_may_have_comfyuis_prefix(tmp_path: Path) -> None:
    config = tiny_config("i2v_clip")
    state = random_model(config).state_dict()
    named = ConvertedWeights(FORMAT, state, config, OFFICIAL)
    save_file({f"model.diffusion_model.{name}": value for name, value in named.items()}, tmp_path / "a.safetensors")
    found = ModelWeights(tmp_path / "a.safetensors", config, FORMAT)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("variant", "changes", "wrong"),
    [
        ("t2v", {"num_layers": 3}, "num_layers = 2, and the model section has num_layers = 3"),
        ("t2v", {"num_attention_heads": 3}, "hidden_size = 32, and the model section has hidden_size = 48"),
        ("i2v", {"in_channels": 4}, "in_channels = 12, and the model section has in_channels = 4"),
        ("i2v_clip", {"image_dim": None}, "image_dim = 20, and the model section has image_dim = None"),
        ("i2v", {"image_dim": 20}, "image_dim = None, and the model section has image_dim = 20"),
        ("t2v", {"ffn_dim": 41}, "ffn_dim = 40, and the model section has ffn_dim = 41"),
    ],
)
def test_a_file_of_another_model_is_refused_by_its_sizes(
    tmp_path: Path, variant: str, changes: dict[str, Any], wrong: str
) -> None:
    config = tiny_config(variant)
    named = ConvertedWeights(FORMAT, random_model(config).state_dict(), config, OFFICIAL)
    save_file(dict(named), tmp_path / "a.safetensors")
    with pytest.raises(WeightsMisfit, match=f"a.safetensors: holds a Wan with {wrong}; make the section"):
        ModelWeights(tmp_path / "a.safetensors", tiny_config(variant, **changes), FORMAT)


@pytest.mark.parametrize(
    ("extra", "wrong"),
    [
        ("scaled_fp8", "holds float8 weights with scales"),
        ("blocks.0.ffn.0.scale_weight", "holds float8 weights with scales"),
        ("vace_patch_embedding.weight", "unknown vace_patch_embedding.weight"),
    ],
)
def test_tensors_of_other_forms_are_refused_by_name(tmp_path: Path, extra: str, wrong: str) -> None:
    config = tiny_config()
    named = ConvertedWeights(FORMAT, random_model(config).state_dict(), config, OFFICIAL)
    save_file({**named, extra: torch.ones(1)}, tmp_path / "a.safetensors")
    for strict in (True, False) if "scale" in extra else (True,):
        with pytest.raises(UserError, match=wrong):
            ModelWeights(tmp_path / "a.safetensors", tiny_config(strict_load=strict), FORMAT)


# Adapters: one of rank 4 and alpha 2, under the names of each trainer.


def golden_adapter() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(factors and alphas by musubi's names, outputs of the adapted model)."""
    tensors = load(lzma.decompress((FOLDER / "lora" / "musubi.safetensors.xz").read_bytes()))
    outputs = {name: value.float() for name, value in tensors.items() if name.startswith("out.")}
    return {name: value for name, value in tensors.items() if name not in outputs}, outputs


LAYERS = [f"{part}.{layer}" for part in ("self_attn", "cross_attn") for layer in "qkvo"] + ["ffn.0", "ffn.2"]
DIFFUSERS_LAYER = {
    "self_attn": "attn1",
    "cross_attn": "attn2",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}


def of_diffusers(layer: str) -> str:
    part, _, last = layer.partition(".")
    return DIFFUSERS_LAYER[layer] if layer in DIFFUSERS_LAYER else f"{DIFFUSERS_LAYER[part]}.{DIFFUSERS_LAYER[last]}"


STYLES: dict[str, tuple[str, str, str, bool]] = {  # prefix, ends of A and B, alpha is in the file
    "diffusers": ("transformer.", "lora_A.weight", "lora_B.weight", False),
    "peft": ("base_model.model.", "lora_A.weight", "lora_B.weight", False),
    "diffusion_pipe": ("diffusion_model.", "lora_A.weight", "lora_B.weight", False),
    "comfyui": ("diffusion_model.", "lora_down.weight", "lora_up.weight", True),
    "musubi": ("lora_unet_", "lora_down.weight", "lora_up.weight", True),
    "videox_fun": ("lora_unet__", "lora_down.weight", "lora_up.weight", True),
    "videox_fun_comfyui": ("lora_unet__", "lora_down.weight", "lora_up.weight", False),
    "videox_fun_peft": ("", "lora_A.weight", "lora_B.weight", False),
    "diffsynth": ("", "lora_A.default.weight", "lora_B.default.weight", False),
}


def adapter_file(style: str, path: Path, layers: list[str] = LAYERS) -> Path:
    factors, (prefix, a, b, has_alpha) = golden_adapter()[0], STYLES[style]
    tensors = {}
    for block in range(2):
        for layer in layers:
            source = f"lora_unet_blocks_{block}_{layer.replace('.', '_')}"
            name = of_diffusers(layer) if style in ("diffusers", "peft") else layer
            name = f"blocks.{block}.{name}"
            name = prefix + (name.replace(".", "_") if prefix.startswith("lora_unet") else name)
            tensors[f"{name}.{a}"] = factors[f"{source}.lora_down.weight"]
            tensors[f"{name}.{b}"] = factors[f"{source}.lora_up.weight"]
            if has_alpha:
                tensors[f"{name}.alpha"] = factors[f"{source}.alpha"]
    save_file(tensors, path)
    return path


def answer(adapters: Adapters) -> Tensor:
    """Of the first sample of the golden model with adapters."""
    model = golden_model("t2v")
    adapt(model, {name: AdapterSize(one.rank, one.scaling) for name, one in adapters.items()}, "dense", torch.float32)
    model.load_state_dict(tensors_of(adapters), strict=False)
    x, t, conditions = inputs_of(model.config, read_golden("t2v")[2], "a")
    with torch.no_grad():
        return model(x[:1], t[:1], conditions.map(lambda one: one[:1]))


@pytest.mark.parametrize("style", STYLES)
def test_adapters_of_every_trainer_act_as_they_do_there(style: str, tmp_path: Path) -> None:
    """Files without alpha are of strength 1, as all readers take them."""
    adapters = read_adapters(FORMAT, adapter_file(style, tmp_path / "a.safetensors"), golden_config("t2v"))
    assert len(adapters) == 20
    outputs, has_alpha = golden_adapter()[1], STYLES[style][3]
    expected = outputs["out.alpha_over_rank" if has_alpha else "out.1"]
    torch.testing.assert_close(answer(adapters), expected, atol=5e-5, rtol=0)
    assert (expected - outputs["out.none"]).abs().max() > 1e-2


def test_a_file_of_some_layers_is_read(tmp_path: Path) -> None:
    path = adapter_file("musubi", tmp_path / "a.safetensors", [layer for layer in LAYERS if "ffn" not in layer])
    assert len(read_adapters(FORMAT, path, golden_config("t2v"))) == 16


@pytest.mark.parametrize("end", ["diff", "diff_b"])
def test_differences_of_distilled_models_are_refused_by_name(end: str, tmp_path: Path) -> None:
    path = adapter_file("comfyui", tmp_path / "a.safetensors")
    name = f"diffusion_model.blocks.0.norm3.{end}"
    save_file({**load_file(path), name: torch.zeros(32)}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=f"the tensor {name} is a full difference"):
        read_adapters(FORMAT, tmp_path / "b.safetensors", golden_config("t2v"))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    path = adapter_file("musubi", tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="is for a layer"):
        read_adapters(FORMAT, path, golden_config("t2v", num_attention_heads=3))


@pytest.mark.parametrize("style", FORMAT.lora_styles)
def test_written_adapters_are_read_here_and_by_diffusers_with_their_strength(style: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    config = golden_config("t2v")
    adapters = read_adapters(FORMAT, adapter_file("musubi", tmp_path / "a.safetensors"), config)
    target = tmp_path / ("peft" if style == "peft" else f"{style}.safetensors")
    save_adapters(FORMAT, adapters, config, target, style)
    expected = golden_adapter()[1]["out.alpha_over_rank"]
    torch.testing.assert_close(answer(read_adapters(FORMAT, target, config)), expected, atol=5e-5, rtol=0)

    facts = {key: value for key, value in FORMAT.folders["diffusers"](config).items() if key != "_class_name"}
    module = diffusers.WanTransformer3DModel.from_config(facts).eval()
    module.load_state_dict(dict(golden_weights("t2v")))
    if style == "peft":
        peft = pytest.importorskip("peft")
        module = peft.PeftModel.from_pretrained(module, target).eval()
    else:
        pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=module)
        pipe.load_lora_weights(str(target))
        module = pipe.transformer
    x, t, conditions = inputs_of(config, read_golden("t2v")[2], "a")
    text = torch.nn.functional.pad(conditions["text"][:1], (0, 0, 0, 512 - conditions["text"].shape[1]))
    with torch.no_grad():
        out = module(hidden_states=x[:1], timestep=t[:1], encoder_hidden_states=text, return_dict=False)[0]
    torch.testing.assert_close(out, expected, atol=5e-5, rtol=0)
