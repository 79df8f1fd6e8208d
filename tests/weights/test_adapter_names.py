"""Adapters of one model under the names of every trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.weights.adapters import Adapter
from longtake.weights.cogvideox import FORMAT
from longtake.weights.format import Form, Format
from longtake.weights.lora import layers_of, read_adapters, save_adapters
from longtake.weights.mmdit import FORMAT as MMDIT
from tests.models.golden import tiny_config as mmdit_config
from tests.models.golden_cogvideox import golden_config

DIFFUSERS_LAYERS = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn1.to_out.0", "proj_out")
OWN_LAYERS = {"transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn1.to_out", "proj_out"}
DOTTED = ("", "module.base_model.model.", "base_model.model.", "base_model.model.transformer.", "transformer.", "dit.")
DOTTED += ("diffusion_model.", "model.diffusion_model.", "module.", "_orig_mod.")
DOTTED += ("pipe.dit.", "net.", "unet.", "base_model.model.model.", "lora_unet.")
FLAT = ("lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_", "lora_dit_")
ENDS = (
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora_A.default_0.weight", ".lora_B.default_0.weight"),
    (".lora_A", ".lora_B"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    (".lora_layer.down.weight", ".lora_layer.up.weight"),
    (".lora_down", ".lora_up"),
)
CONFIG = golden_config("t2v_2b")


def matrices(layers: dict[str, tuple[int, ...]], ends: tuple[str, str]) -> dict[str, Tensor]:
    tensors = {}
    for name, (rows, columns) in layers.items():
        tensors |= {name + ends[0]: torch.ones(2, columns), name + ends[1]: torch.ones(rows, 2)}
    return tensors


def test_adapter_is_read_behind_every_prefix_and_before_every_end(tmp_path: Path) -> None:
    sizes = layers_of(FORMAT, CONFIG, FORMAT.as_published("diffusers"))
    pairs = [(prefix, ENDS[i % len(ENDS)]) for i, prefix in enumerate(DOTTED + FLAT)]
    pairs += [(prefix, ends) for ends in ENDS for prefix in (DOTTED[0], FLAT[0])]
    for number, (prefix, ends) in enumerate(pairs):
        names = {layer: layer.replace(".", "_") if prefix in FLAT else layer for layer in DIFFUSERS_LAYERS}
        layers = {prefix + name: sizes[layer] for layer, name in names.items()}
        save_file(matrices(layers, ends), tmp_path / f"{number}.safetensors")
        assert read_adapters(FORMAT, tmp_path / f"{number}.safetensors", CONFIG).keys() == OWN_LAYERS, prefix


@pytest.mark.parametrize("naming", ["diffusers", "fused", "split"])
@pytest.mark.parametrize("prefix", ["lora_transformer_", "lora_unet_", "lycoris_"])
def test_every_layer_of_every_naming_is_read_flat(naming: str, prefix: str, tmp_path: Path) -> None:
    config = mmdit_config()
    layers = layers_of(MMDIT, config, MMDIT.as_published(naming))
    names = {prefix + layer.replace(".", "_"): size for layer, size in layers.items()}
    save_file(matrices(names, ENDS[4]), tmp_path / "a.safetensors")
    found = read_adapters(MMDIT, tmp_path / "a.safetensors", config)
    assert found.keys() == layers_of(MMDIT, config, MMDIT.own(config)).keys()


def comfy_keys(form: Format, config: object, naming: str) -> dict[str, str]:
    """ComfyUI's rule for any model: name of a layer in an adapter file -> name of the layer."""
    layers = layers_of(form, config, form.as_published(naming))
    return {f"lora_unet_{layer.replace('.', '_')}": layer for layer in layers} | {
        f"diffusion_model.{layer}": layer for layer in layers
    }


COMFY_COGVIDEOX = {  # modules of ComfyUI's own CogVideoXTransformer3DModel
    *(f"time_embedding_linear_{n}" for n in (1, 2)),
    *("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
    *(f"blocks.{n}.{part}" for n in (0, 1) for part in ("q", "k", "v", "attn_out", "ff_proj", "ff_out")),
    *(f"blocks.{n}.norm{part}.linear" for n in (0, 1) for part in (1, 2)),
}


def test_comfy_naming_of_cogvideox_is_that_of_comfyui() -> None:
    assert layers_of(FORMAT, CONFIG, FORMAT.as_published("comfy")).keys() == COMFY_COGVIDEOX


@pytest.mark.parametrize(("form", "config", "naming"), [(FORMAT, CONFIG, "comfy"), (MMDIT, mmdit_config(), "fused")])
def test_comfy_files_have_an_effect_in_comfyui(form: Format, config: object, naming: str, tmp_path: Path) -> None:
    own = layers_of(form, config, form.own(config))
    drawn = {
        layer: Adapter(torch.randn(2, columns), torch.randn(rows, 2), 0.25)
        for layer, (rows, columns) in own.items()
        if layer not in ("cond_in",)
    }
    save_adapters(form, drawn, config, tmp_path / "a.safetensors", "comfy")
    tensors, keys = load_file(tmp_path / "a.safetensors"), comfy_keys(form, config, naming)
    sizes = layers_of(form, config, form.as_published(naming))
    applied = {name.split(".lora_up")[0] for name in tensors if ".lora_up.weight" in name}
    assert {keys[name] for name in applied} == {layer for layer in sizes if layer not in ("cond_in",)}
    deltas = {}
    for name in applied:
        up, down = tensors[f"{name}.lora_up.weight"], tensors[f"{name}.lora_down.weight"]
        scale = tensors[f"{name}.alpha"].item() / down.shape[0]
        deltas[keys[name]] = scale * up.flatten(1) @ down.flatten(1)
    back = read_adapters(form, tmp_path / "a.safetensors", config)
    for layer, adapter in drawn.items():
        expected = adapter.scaling * adapter.b @ adapter.a
        torch.testing.assert_close(back[layer].scaling * back[layer].b @ back[layer].a, expected)
        if layer in deltas:
            torch.testing.assert_close(deltas[layer], expected)


def test_patch_embedding_is_written_as_the_convolution_it_is_in_files(tmp_path: Path) -> None:
    rows, columns = layers_of(FORMAT, CONFIG, FORMAT.own(CONFIG))["patch_embed.proj"]
    drawn = {"patch_embed.proj": Adapter(torch.randn(2, columns), torch.randn(rows, 2), 0.5)}
    form = FORMAT.namings["diffusers"].forms["patch_embed.proj.weight"]
    assert isinstance(form, Form)
    save_adapters(FORMAT, drawn, CONFIG, tmp_path / "a.safetensors", "diffusers")
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors["transformer.patch_embed.proj.lora_A.weight"].shape == (2, *form.shape(CONFIG)[1:])
    assert tensors["transformer.patch_embed.proj.lora_B.weight"].shape == (rows, 2, 1, 1)
    back = read_adapters(FORMAT, tmp_path / "a.safetensors", CONFIG)["patch_embed.proj"]
    torch.testing.assert_close(back.b @ back.a, 0.5 * drawn["patch_embed.proj"].b @ drawn["patch_embed.proj"].a)
