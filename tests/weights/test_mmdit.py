"""MMDiT layouts: every foreign name is mapped or named, every conversion keeps the model, every trip comes back."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from longtake.weights.conversion import ConvertedWeights, plan_conversion, reorder_heads
from longtake.weights.files import save_weights
from longtake.weights.format import WeightLayout
from longtake.weights.mmdit import DIFFUSERS, FLUX, FORMAT, OPEN_SORA_V2
from longtake.weights.model import ModelWeights
from tests.models.golden import (
    CASES,
    FOLDER,
    assert_equals_golden,
    golden_case,
    random_inputs,
    read_golden,
    tiny_config,
    weights_path,
)
from tests.models.initialised import initialise
from tests.precision import within
from tests.weights.saved import save_model

LAYOUTS = [WeightLayout(names, rope) for names in ("split", "fused") for rope in ("half", "interleaved")]
WITH_DIFFUSERS = [*LAYOUTS, DIFFUSERS]


def model_of(config: MMDiTConfig, state: dict[str, Tensor]) -> MMDiT:
    model = MMDiT(config)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model


def load_mmdit(path: Path, config: MMDiTConfig, rope: Any = None) -> dict[str, Tensor]:
    return dict(ModelWeights(path, config, FORMAT, rope))


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_files_of_the_reference_load_and_give_its_output_and_gradients(kind: str, case: str) -> None:
    """The reference ran every case on the same weights, whatever its rotary layout: `rope` says so to the loader."""
    golden = golden_case(kind, case, strict_load=False)
    rope = FORMAT.own(golden.config).rope
    assert_equals_golden(golden, model_of(golden.config, load_mmdit(weights_path(kind), golden.config, rope)))


@pytest.mark.parametrize("target", LAYOUTS, ids=lambda layout: f"{layout.names}-{layout.rope}")
@pytest.mark.parametrize(("kind", "case"), [("split", "half_cond"), ("fused", "interleaved_guidance")])
def test_a_model_in_any_layout_gives_the_output_of_the_file_it_came_from(
    kind: str, case: str, target: WeightLayout
) -> None:
    golden = golden_case(
        kind, case, strict_load=False, fused_qkv=target.names == "fused", use_liger_rope=target.rope == "half"
    )
    model = model_of(golden.config, load_mmdit(weights_path(kind), golden.config))
    assert within((golden.run(model) - golden.out).abs().max(), 5e-5)


def test_head_order_is_the_references_permutation() -> None:
    _, parts = read_golden("mmdit_parts")
    q = parts["rope.q"]  # [1, 2, 15, 128]
    rows = q.permute(1, 3, 0, 2).reshape(2 * 128, 15)
    found = reorder_heads(rows, 128, "half")
    assert torch.equal(found, parts["rope.permute.q"].permute(1, 3, 0, 2).reshape(2 * 128, 15))
    assert torch.equal(reorder_heads(found, 128, "interleaved"), rows)


@pytest.mark.parametrize("target", WITH_DIFFUSERS, ids=lambda layout: f"{layout.names}-{layout.rope}")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_layout_round_trips_through_a_file(
    tmp_path: Path, target: WeightLayout, fused: bool, half: bool, bias: bool
) -> None:
    own = {} if target == DIFFUSERS else {"cond_embed": True, "qkv_bias": bias}
    config = tiny_config(fused_qkv=fused, use_liger_rope=half, guidance_embed=bias, depth=2, **own)
    model = MMDiT(config)
    initialise(model, 5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norm scales too: their order matters
    state = model.state_dict()
    save_model(FORMAT, state, config, tmp_path / "w", target, max_file_bytes=40_000)
    assert len(list((tmp_path / "w").glob("*.safetensors"))) > 1
    found = load_mmdit(tmp_path / "w", config)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("name", "layout"), [("open_sora_v2", OPEN_SORA_V2), ("video_dc_ae", OPEN_SORA_V2), ("flux_dev", FLUX)]
)
def test_full_size_plans_use_every_tensor_of_the_reference_once(name: str, layout: WeightLayout) -> None:
    info = json.loads((FOLDER / "mmdit_state_keys.json").read_text())[name]
    depth = {"double_blocks": info["depth"], "single_blocks": info["depth_single_blocks"]}
    names = {
        key.replace("*", str(i)) for key in info["shapes"] for i in range(depth[key.split(".")[0]] if "*" in key else 1)
    }
    assert len(names) == info["num_tensors"]
    config = MMDiTConfig(cond_embed="cond_in.weight" in names, guidance_embed="guidance_in.in_layer.weight" in names)
    for target in (OPEN_SORA_V2, FLUX, DIFFUSERS):
        plan = plan_conversion(FORMAT, config, layout, target)
        assert {piece.tensor for pieces in plan.values() for piece in pieces} == names
        for kind in "weight", "bias":
            joined = f"single_blocks.0.linear1.{kind}"
            rows = [(p.start, p.stop) for pieces in plan.values() for p in pieces if p.tensor == joined]
            if layout == FLUX and target == OPEN_SORA_V2:
                assert sorted(rows) == [(0, 3072), (3072, 6144), (6144, 21504)]


def test_flux_with_a_fused_rope_is_the_flux_that_it_was_made_from(tmp_path: Path) -> None:
    """`flux1-dev-fused-rope` says nothing of itself but by its names: FLUX taken apart, channels of heads reordered."""
    bfl = tiny_config(fused_qkv=True, use_liger_rope=False, guidance_embed=True)
    model = MMDiT(bfl)
    initialise(model, 5)
    flux = model.state_dict()
    made: dict[str, Tensor] = {}
    for name, value in flux.items():
        layer, _, kind = name.rpartition(".")
        if layer.endswith("attn.qkv"):
            q, k, v = value.chunk(3)
            parts = {"q_proj": half_split(q), "k_proj": half_split(k), "v_proj": v}
            made |= {f"{layer.removesuffix('qkv')}{part}.{kind}": rows for part, rows in parts.items()}
        elif layer.endswith("linear1"):
            q, k, rest = value.tensor_split([32, 64])
            parts = {"q_proj": half_split(q), "k_proj": half_split(k), "v_mlp": rest}
            made |= {f"{layer.removesuffix('linear1')}{part}.{kind}": rows for part, rows in parts.items()}
        else:
            made[name] = half_split(value) if layer.endswith(("query_norm", "key_norm")) else value
    save_weights({name: value.contiguous() for name, value in made.items()}, tmp_path / "any name.safetensors")
    save_weights(flux, tmp_path / "another.safetensors")
    config = tiny_config(strict_load=False)
    loaded, wanted = (load_mmdit(tmp_path / f"{name}.safetensors", config) for name in ("any name", "another"))
    assert loaded.keys() == wanted.keys() == MMDiT(config).state_dict().keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def half_split(rows: Tensor) -> Tensor:
    """Rows of q or k, or a norm's scale, of heads of 16 channels: even ones first, then odd ones."""
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in rows.split(16)])


def test_the_open_sora_export_has_the_released_names() -> None:
    config = tiny_config(fused_qkv=True, use_liger_rope=False)
    names = {
        re.sub(r"_blocks\.\d+\.", "_blocks.*.", name)
        for name in ConvertedWeights(FORMAT, MMDiT(config).state_dict(), config, OPEN_SORA_V2)
    }
    expected = json.loads((FOLDER / "mmdit_state_keys.json").read_text())["open_sora_v2"]["shapes"]
    assert names == {name for name in expected if not name.startswith("cond_in")}


def test_a_state_dict_of_another_config_is_refused_by_the_export() -> None:
    with pytest.raises(UserError, match="missing cond_in"):
        ConvertedWeights(FORMAT, MMDiT(tiny_config()).state_dict(), tiny_config(cond_embed=True), OPEN_SORA_V2)


def test_unknown_and_missing_tensors_are_all_named_and_stop_the_load() -> None:
    config = golden_case("split", "half").config
    with pytest.raises(UserError, match=re.escape("unknown cond_in.bias, cond_in.weight, guidance_in")) as fault:
        load_mmdit(weights_path("split"), config)
    assert "set model.strict_load to False" in str(fault.value)
    deeper = golden_case("split", "half_cond_guidance", depth=4).config
    with pytest.raises(UserError, match=re.escape("missing double_blocks.{2..3}.img_attn.k_proj.bias")):
        load_mmdit(weights_path("split"), deeper)


def test_without_strict_load_differences_are_noted_once_and_the_rest_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = golden_case("split", "half_guidance", strict_load=False, depth=3).config
    with caplog.at_level(logging.WARNING):
        weights = ModelWeights(weights_path("split"), config, FORMAT)
    assert weights.surplus == ["cond_in.bias", "cond_in.weight"]
    assert all(name.startswith("double_blocks.2.") for name in weights.missing)
    (note,) = weights.notes
    assert "missing double_blocks.2.img_attn" in note
    assert "unknown cond_in.bias, cond_in.weight" in note
    assert not caplog.records, "who reads the notes tells them"
    assert set(weights) | set(weights.missing) == set(MMDiT(config).state_dict())


def test_a_tensor_of_another_size_is_refused_even_without_strict_load() -> None:
    config = golden_case("split", "half_cond_guidance", strict_load=False, context_in_dim=48).config
    with pytest.raises(UserError, match=re.escape("txt_in.weight has shape [32, 32], the model needs [32, 48]")):
        load_mmdit(weights_path("split"), config)


def test_codes_of_quantised_weights_are_not_taken_for_weights(tmp_path: Path) -> None:
    config = golden_case("split", "half_cond_guidance").config
    state = load_mmdit(weights_path("split"), config)
    save_weights(state | {"img_in.weight": state["img_in.weight"].to(torch.int8)}, tmp_path / "codes.safetensors")
    with pytest.raises(UserError, match=r"img_in.weight is kept as int8, .*; give the weights in bf16 or float32"):
        load_mmdit(tmp_path / "codes.safetensors", config)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("end", ["scale_weight", "weight_scale"])
def test_float8_weights_with_scales_are_named(end: str, strict: bool, tmp_path: Path) -> None:
    config = tiny_config(strict_load=strict)
    state = {name: torch.ones_like(t, dtype=torch.float8_e4m3fn) for name, t in MMDiT(config).state_dict().items()}
    state[f"double_blocks.0.img_mlp.0.{end}"] = torch.ones(1)
    file = save_weights(state, tmp_path / "w.safetensors")[0]
    with pytest.raises(UserError, match=r"float8 weights with scales"):
        ModelWeights(file, config, FORMAT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_base_weights_with_a_value_that_is_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    config = tiny_config()
    state = {name: torch.ones_like(t, dtype=torch.bfloat16) for name, t in MMDiT(config).state_dict().items()}
    state["double_blocks.0.img_mlp.0.weight"].view(-1)[7] = value
    weights = ModelWeights(save_weights(state, tmp_path / "w.safetensors")[0], config, FORMAT)
    with pytest.raises(UserError, match=r"double_blocks\.0\.img_mlp\.0\.weight holds 1 values"):
        dict(weights)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["transformer_blocks.0.attn.to_q.weight"], "holds no MMDiT weights"),
        (["encoder.weight"], "holds no MMDiT weights"),
        (["img_in.weight", "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.q_proj.weight"], "mixes fused"),
    ],
)
def test_files_of_other_models_are_told_apart(tmp_path: Path, names: list[str], sentence: str) -> None:
    save_weights({name: torch.zeros(1) for name in names}, tmp_path)
    with pytest.raises(UserError, match=sentence):
        load_mmdit(tmp_path, tiny_config())


def test_a_file_with_an_unknown_rotary_order_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    save_weights(MMDiT(config).state_dict(), tmp_path, {"longtake.rope": "spiral"})
    with pytest.raises(UserError, match=r"longtake\.rope = 'spiral'; it must be half or interleaved"):
        load_mmdit(tmp_path, config)


def test_lazy_weights_make_one_tensor_at_a_time_and_equal_the_loaded_ones() -> None:
    config = golden_case("fused", "interleaved_guidance", fused_qkv=False, use_liger_rope=True).config
    weights = ModelWeights(weights_path("fused"), config, FORMAT)
    assert weights.layout == FLUX
    assert not weights.missing
    assert not weights.surplus
    name = "single_blocks.0.v_mlp.weight"
    assert torch.equal(weights[name], load_mmdit(weights_path("fused"), config)[name])
    x, t, conditions = random_inputs(config)
    assert torch.isfinite(model_of(config, dict(weights))(x, t, conditions)).all()


def test_converting_to_the_own_layout_copies_nothing() -> None:
    config = tiny_config()
    state = MMDiT(config).state_dict()
    same = ConvertedWeights(FORMAT, state, config, FORMAT.own(config))
    assert all(same[name].data_ptr() == state[name].data_ptr() for name in state)
    assert all(torch.equal(same[name], state[name]) for name in state)


def test_growth_makes_an_image_to_video_model_that_answers_as_the_text_to_video_one(tmp_path: Path) -> None:
    plain = tiny_config()
    model = MMDiT(plain)
    initialise(model, 3)
    save_model(FORMAT, model.state_dict(), plain, tmp_path / "t2v.safetensors", OPEN_SORA_V2)
    config = tiny_config(cond_embed=True, grow_cond_in=True)
    weights = ModelWeights(tmp_path / "t2v.safetensors", config, FORMAT)
    assert weights.notes == [f"{tmp_path / 't2v.safetensors'} has no cond_in: it starts at zero (model.grow_cond_in)"]
    grown = model_of(config, dict(weights))
    assert not grown.cond_in.weight.any()
    x, t, conditions = random_inputs(plain)
    assert torch.equal(grown(x, t, conditions), model(x, t, conditions))
    save_model(FORMAT, grown.state_dict(), config, tmp_path / "i2v.safetensors", OPEN_SORA_V2)
    assert not ModelWeights(tmp_path / "i2v.safetensors", config, FORMAT).notes, "what has cond_in does not grow"


def test_growth_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    plain, with_cond = tiny_config(), tiny_config(cond_embed=True)
    save_model(FORMAT, MMDiT(plain).state_dict(), plain, tmp_path / "t2v.safetensors", OPEN_SORA_V2)
    save_model(FORMAT, MMDiT(with_cond).state_dict(), with_cond, tmp_path / "i2v.safetensors", OPEN_SORA_V2)
    with pytest.raises(UserError, match=r"missing cond_in.*set model\.grow_cond_in to True to start cond_in at zero"):
        load_mmdit(tmp_path / "t2v.safetensors", with_cond)
    with pytest.raises(UserError, match=r"unknown cond_in.*an image-to-video model: set model\.cond_embed to True"):
        load_mmdit(tmp_path / "i2v.safetensors", plain)
    with pytest.raises(ValueError, match="cond_embed is False, so there is no cond_in"):
        tiny_config(grow_cond_in=True)
    loose = ModelWeights(tmp_path / "i2v.safetensors", tiny_config(strict_load=False), FORMAT)
    assert "cond_in.weight; passed over (model.strict_load is False)" in loose.notes[0]


def test_half_of_cond_in_is_a_fault_and_not_growth(tmp_path: Path) -> None:
    config = tiny_config(cond_embed=True, grow_cond_in=True)
    state = MMDiT(config).state_dict()
    del state["cond_in.bias"]
    save_weights(state, tmp_path / "half.safetensors")
    with pytest.raises(UserError, match=r"missing cond_in\.bias"):
        load_mmdit(tmp_path / "half.safetensors", config)


def test_an_old_checkpoint_folder_is_read_from_its_model_folder(tmp_path: Path) -> None:
    config = tiny_config()
    state = MMDiT(config).state_dict()
    save_weights(state, tmp_path / "epoch1-global_step2" / "model", max_file_bytes=40_000)
    found = load_mmdit(tmp_path / "epoch1-global_step2", config)
    assert all(torch.equal(found[name], state[name]) for name in state)
