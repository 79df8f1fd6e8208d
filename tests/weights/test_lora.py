"""Adapter files: every family's own library reads them as we mean them, and they come back as they were."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.models.lora import LoraLinear, adapt, target_layers
from longtake.models.mmdit import MMDiT
from longtake.system.lora import adapter_sizes, fill
from longtake.weights.adapters import Adapter, adapters_of, convert_adapters, merged, tensors_of
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.format import WeightLayout
from longtake.weights.lora import find_adapters, read_adapters, save_adapters
from longtake.weights.mmdit import DIFFUSERS, FLUX, FORMAT, OPEN_SORA_V2
from tests.models.golden import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.test_hub import put

FAMILIES = ("peft", "diffusers", "comfy")
LAYOUTS = [{"fused_qkv": fused, "use_liger_rope": half} for fused, half in product((False, True), (False, True))]


def model_of(config: MMDiTConfig) -> MMDiT:
    model = MMDiT(config)
    initialise(model, 3)
    return model


def drawn(config: MMDiTConfig, dora: bool = False, targets: tuple[str, ...] | None = None) -> dict[str, Adapter]:
    """Adapters of rank 2, each with an alpha of its own."""
    generator = torch.Generator().manual_seed(1)
    model = MMDiT(config)
    found = {}
    for name in target_layers(model, targets, FORMAT.lora_targets):
        rows, columns = model.get_submodule(name).weight.shape
        a, b = (torch.randn(*shape, generator=generator) / 8 for shape in ((2, columns), (rows, 2)))
        found[name] = Adapter(
            a, b, 1.5 + len(found) % 5 / 4, torch.rand(rows, generator=generator) + 0.5 if dora else None
        )
    return found


def in_place(path: Path, family: str) -> Path:
    return path / "adapters" if family == "peft" else path / "adapters.safetensors"


def changed(state: dict[str, Tensor], adapters: dict[str, Adapter]) -> dict[str, Tensor]:
    """The state with adapters merged into it."""
    new = {f"{layer}.weight": merged(state[f"{layer}.weight"], adapter) for layer, adapter in adapters.items()}
    return {**state, **new}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("changes", LAYOUTS)
@pytest.mark.parametrize("target", [OPEN_SORA_V2, FLUX, DIFFUSERS])
def test_adapting_and_renaming_may_change_places(target: WeightLayout, changes: dict[str, Any], dora: bool) -> None:
    config = tiny_config(**changes)
    adapters = drawn(config, dora)
    state = model_of(config).state_dict()
    converted = convert_adapters(FORMAT, adapters, config, FORMAT.own(config), target)
    assert_same(
        changed(ConvertedWeights(FORMAT, state, config, target), converted),
        ConvertedWeights(FORMAT, changed(state, adapters), config, target),
    )


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("changes", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family: str, changes: dict[str, Any], dora: bool, tmp_path: Path) -> None:
    config = tiny_config(**changes)
    adapters = drawn(config, dora, ("*_blocks.*", "img_in", "final_layer.*"))
    save_adapters(FORMAT, adapters, config, in_place(tmp_path, family), family)
    back = read_adapters(FORMAT, in_place(tmp_path, family), config)
    state = model_of(config).state_dict()
    assert_same(changed(state, back), changed(state, adapters))


def test_adapters_of_some_projections_are_joined_beside_nothing(tmp_path: Path) -> None:
    config = tiny_config()
    adapters = drawn(config, targets=("img_attn.q_proj", "single_blocks.0.k_proj"))
    save_adapters(FORMAT, adapters, config, tmp_path / "a.safetensors", "comfy")
    back = read_adapters(FORMAT, tmp_path / "a.safetensors", config.model_copy(update={"fused_qkv": True}))
    assert set(back) == {"double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"}
    state = model_of(config).state_dict()
    fused = ConvertedWeights(FORMAT, state, config, WeightLayout("fused", "half"))
    assert_same(
        changed(fused, back), ConvertedWeights(FORMAT, changed(state, adapters), config, WeightLayout("fused", "half"))
    )
    partly = drawn(config, dora=True, targets=("img_attn.q_proj",))
    with pytest.raises(UserError, match="joins layers of which DoRA has adapted only some"):
        save_adapters(FORMAT, partly, config, tmp_path / "b.safetensors", "comfy")


@pytest.mark.parametrize("dora", [False, True])
def test_peft_gives_our_output(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = tiny_config()
    adapters = drawn(config, dora)
    save_adapters(FORMAT, adapters, config, tmp_path / "peft", "peft", base="flux.safetensors")
    theirs = peft.PeftModel.from_pretrained(model_of(config), tmp_path / "peft").eval()
    assert theirs.peft_config["default"].base_model_name_or_path == "flux.safetensors"
    ours = model_of(config)
    adapt(ours, adapter_sizes(FORMAT, ours, LoraConfig(), adapters), "dense", torch.float32)
    fill(ours, tensors_of(adapters))
    x, t, conditions = random_inputs(config)
    torch.testing.assert_close(ours(x, t, conditions), theirs(x, t, conditions))
    theirs.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    again = read_adapters(FORMAT, tmp_path / "again", config)
    assert {layer: a.alpha for layer, a in again.items()} == {layer: a.alpha for layer, a in adapters.items()}
    assert all(torch.equal(tensor, tensors_of(adapters)[name]) for name, tensor in tensors_of(again).items())
    back = adapters_of(dict(ours.named_parameters()), lambda layer: ours.get_submodule(layer).scaling)
    assert all(torch.equal(back[layer].b, adapter.b) for layer, adapter in adapters.items())
    assert isinstance(ours.double_blocks[0].img_attn.proj, LoraLinear)


def test_what_peft_trained_is_read_with_its_alphas(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = tiny_config()
    settings = peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=["proj", "linear2"], alpha_pattern={"single_blocks.0.linear2": 12}
    )
    theirs = peft.get_peft_model(model_of(config), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    adapters = read_adapters(FORMAT, tmp_path, config)
    assert {name: adapter.scaling for name, adapter in adapters.items()} == {
        "double_blocks.0.img_attn.proj": 0.5,
        "double_blocks.0.txt_attn.proj": 0.5,
        "single_blocks.0.linear2": 3.0,
        "single_blocks.1.linear2": 0.5,
    }
    assert_same(changed(model_of(config).state_dict(), adapters), theirs.merge_and_unload().state_dict())


@pytest.mark.parametrize("dora", [False, True])
def test_peft_merges_takes_off_saves_and_reads_again(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = tiny_config()
    adapters, plain = drawn(config, dora), model_of(config).state_dict()
    save_adapters(FORMAT, adapters, config, tmp_path / "ours", "peft")

    def wrapped(name: str) -> Any:
        return peft.PeftModel.from_pretrained(model_of(config), tmp_path / name)

    theirs = wrapped("ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(wrapped("theirs").merge_and_unload().state_dict(), changed(plain, adapters))
    x, t, conditions = random_inputs(config)
    beside = theirs.eval()(x, t, conditions)
    theirs.merge_adapter()
    torch.testing.assert_close(theirs(x, t, conditions), beside)
    theirs.unmerge_adapter()
    assert_same(theirs.unload().state_dict(), plain)


@pytest.mark.parametrize("dora", [False, True])
def test_diffusers_loads_and_fuses_what_we_mean(dora: bool, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

    config = tiny_config(vec_in_dim=16, guidance_embed=True)
    adapters = drawn(config, dora, ("*_blocks.*", "img_in", "final_layer.*"))
    save_adapters(FORMAT, adapters, config, tmp_path / "lora.safetensors", "diffusers")
    theirs = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    state = model_of(config).state_dict()
    theirs.load_state_dict(ConvertedWeights(FORMAT, state, config, DIFFUSERS))
    read, metadata = FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "lora.safetensors"), return_lora_metadata=True)
    theirs.load_lora_adapter(read, prefix="transformer", metadata=metadata, adapter_name="default")
    theirs.save_lora_adapter(tmp_path / "again")
    assert_same(changed(state, read_adapters(FORMAT, tmp_path / "again", config)), changed(state, adapters))
    theirs.fuse_lora()
    theirs.unload_lora()
    assert_same(theirs.state_dict(), ConvertedWeights(FORMAT, changed(state, adapters), config, DIFFUSERS))


def test_diffusers_takes_comfys_file_for_the_same(tmp_path: Path) -> None:
    loaders = pytest.importorskip("diffusers.loaders.lora_pipeline")
    config = tiny_config(depth_single_blocks=0)  # diffusers knows the widths of the real single blocks alone
    adapters = drawn(config, targets=("*_blocks.*",))
    for family in ("comfy", "diffusers"):
        save_adapters(FORMAT, adapters, config, tmp_path / f"{family}.safetensors", family)
    comfy = loaders.FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "comfy.safetensors"))
    wanted = load_file(tmp_path / "diffusers.safetensors")
    assert comfy.keys() == wanted.keys()
    for layer, adapter in convert_adapters(FORMAT, adapters, config, FORMAT.own(config), DIFFUSERS).items():
        up, down = (f"transformer.{layer}.lora_{matrix}.weight" for matrix in "BA")
        torch.testing.assert_close(comfy[up] @ comfy[down], wanted[up] @ wanted[down])
        torch.testing.assert_close(wanted[up], adapter.b * adapter.scaling)


def test_adapters_on_the_hub_are_found_by_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = tiny_config()
    folders = {family: put(tmp_path, f"owner/{family}") for family in ("peft", "diffusers")}
    save_adapters(FORMAT, drawn(config), config, folders["peft"], "peft")
    save_adapters(FORMAT, drawn(config), config, folders["diffusers"] / "pytorch_lora_weights.safetensors", "diffusers")
    for family, folder in folders.items():
        assert find_adapters(f"owner/{family}") == folder
        assert read_adapters(FORMAT, folder, config).keys() == drawn(config).keys()
    with pytest.raises(UserError, match=r"lora.from_pretrained = 'owner/other': is neither a path .* nor in the"):
        find_adapters("owner/other")


def test_a_run_given_as_adapters_is_told_the_way_to_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"is a run, not adapters; .* `longtake checkpoint export .* --lora peft`"):
        find_adapters(str(tmp_path))


def test_alpha_is_in_every_file(tmp_path: Path) -> None:
    config = tiny_config()
    for family in FAMILIES:
        save_adapters(FORMAT, drawn(config), config, in_place(tmp_path / family, family), family)
    assert json.loads((tmp_path / "peft" / "adapters" / "adapter_config.json").read_text())["lora_alpha"] == 3
    comfy = load_file(tmp_path / "comfy" / "adapters.safetensors")
    assert comfy["lora_unet_single_blocks_0_linear2.alpha"] == 3.0
    assert comfy["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 9.0  # of rank 6: three adapters side by side


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    save_file({"img_in.weight": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=r"img_in.weight is not part of an adapter"):
        read_adapters(FORMAT, tmp_path / "weights.safetensors", config)
    save_file({f"unet.x.lora_{k}.weight": torch.zeros(2, 2) for k in "AB"}, tmp_path / "unet.safetensors")
    with pytest.raises(UserError, match=r"holds adapters of x, which the model does not have"):
        read_adapters(FORMAT, tmp_path / "unet.safetensors", config)
    save_file({"img_in.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "half.safetensors")
    with pytest.raises(UserError, match=r"the adapter of img_in lacks one of its two matrices"):
        read_adapters(FORMAT, tmp_path / "half.safetensors", config)
    save_adapters(FORMAT, drawn(config), config, tmp_path / "good.safetensors", "diffusers")
    with pytest.raises(UserError, match=r"is for a layer \[32, 32\], the model's is \[64, 64\]"):
        read_adapters(FORMAT, tmp_path / "good.safetensors", tiny_config(hidden_size=64, num_heads=4))


def test_known_frames_have_no_place_in_foreign_files(tmp_path: Path) -> None:
    config = tiny_config(cond_embed=True)
    with pytest.raises(UserError, match=r"reaches cond_in"):
        save_adapters(FORMAT, drawn(config, targets=("cond_in",)), config, tmp_path / "a.safetensors", "diffusers")
