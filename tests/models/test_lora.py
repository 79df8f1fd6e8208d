"""Adapters: they start as nothing, equal PEFT's in value and gradient, and train alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.models.initial import initial_values
from longtake.models.lora import AdapterSize, LoraLinear, adapt, freeze, frozen_names, target_layers
from longtake.models.mmdit import MMDiT
from longtake.weights.mmdit import FORMAT
from tests.models.golden import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.precision import within


def tiny(**changes: Any) -> MMDiTConfig:
    return tiny_config(depth=2, **changes)


def model(sizes: dict[str, AdapterSize] | None = None, base: str = "dense", **changes: Any) -> MMDiT:
    built = MMDiT(tiny(**changes))
    if sizes is not None:
        adapt(built, sizes, base, torch.float32)
    initialise(built, 3)
    return built


def usual_layers(model: MMDiT) -> list[str]:
    return target_layers(model, None, FORMAT.lora_targets)


def every(layers: list[str], dora: bool = False) -> dict[str, AdapterSize]:
    return dict.fromkeys(layers, AdapterSize(4, 0.5, dora))


def predict(built: nn.Module, config: MMDiTConfig) -> Tensor:
    x, t, conditions = random_inputs(config, (2, 4, 4), batch=2, text_tokens=3)
    return built(x, t, conditions)


@pytest.mark.parametrize("fused", [False, True])
def test_by_default_attention_and_mlps_of_all_blocks_have_adapters(fused: bool) -> None:
    plain = model(fused_qkv=fused)
    layers = usual_layers(plain)
    assert set(layers) == {
        name
        for name, layer in plain.named_modules()
        if isinstance(layer, nn.Linear) and "blocks" in name and not name.endswith((".lin", "modulation"))
    }


def test_adapters_of_the_released_model_are_a_small_part_of_it() -> None:
    with torch.device("meta"):
        built = MMDiT(MMDiTConfig(cond_embed=True))
    whole = sum(p.numel() for p in built.parameters())
    adapt(built, dict.fromkeys(usual_layers(built), AdapterSize(16, 1.0)), "nf4", torch.bfloat16)
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    kept = sum(p.numel() * p.element_size() for p in built.parameters() if not p.requires_grad)
    assert 100 * trained < whole
    assert kept < 0.6 * whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("base", ["dense", "int8", "fp8", "nf4"])
def test_adapters_train_in_bf16_on_cuda(base: str) -> None:
    sizes = {"hidden_size": 128, "num_heads": 2, "axes_dim": (16, 24, 24)}
    built = MMDiT(tiny(**sizes))
    adapt(built, every(usual_layers(built)), base, torch.bfloat16)
    built.cuda()
    initialise(built, 3)
    wanted = model(**sizes)
    with torch.autocast("cuda", torch.bfloat16):
        x, t, conditions = random_inputs(tiny(**sizes), (2, 4, 4), batch=2, text_tokens=3)
        found = built(x.cuda(), t.cuda(), conditions.map(torch.Tensor.cuda))
    found.float().square().sum().backward()
    assert {n for n, p in built.named_parameters() if p.grad is not None} == {
        n for n, _ in built.named_parameters() if n.endswith(("lora_a", "lora_b"))
    }
    expected = predict(wanted, tiny(**sizes))
    assert within((found.cpu().float() - expected).norm(), 0.15 * expected.norm())


def test_targets_are_ends_of_names_or_patterns() -> None:
    assert target_layers(model(), ["img_attn.q_proj"]) == [f"double_blocks.{i}.img_attn.q_proj" for i in (0, 1)]
    assert target_layers(model(), ["single_blocks.1.*_proj"]) == ["single_blocks.1.q_proj", "single_blocks.1.k_proj"]
    assert len(target_layers(model(), ["q_proj"])) == 6
    with pytest.raises(UserError, match=r"lora.targets: 'to_q' names no linear layer; choose among .*img_attn.q_proj"):
        target_layers(model(), ["to_q"])


def test_adapters_start_as_nothing_and_train_alone() -> None:
    plain = model()
    adapted = model(every(usual_layers(plain)))
    torch.testing.assert_close(predict(adapted, tiny()), predict(plain, tiny()))
    predict(adapted, tiny()).square().sum().backward()
    with_gradient = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in adapted.named_parameters() if name.endswith(("lora_a", "lora_b"))}


def test_names_of_the_base_stay() -> None:
    adapted = model(every(["single_blocks.0.linear2"]))
    assert set(model().state_dict()) < set(adapted.state_dict())


def test_where_an_adapter_starts_depends_on_its_name_alone() -> None:
    one = model(every(["single_blocks.0.linear2"]))
    many = model(every(usual_layers(model())))
    name = "single_blocks.0.linear2.lora_a"
    assert torch.equal(one.get_parameter(name), many.get_parameter(name))
    assert torch.equal(initial_values(one, name, 3)[name], one.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), many.get_parameter("single_blocks.1.linear2.lora_a"))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapted_layer_is_that_of_peft(dora: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Linear(12, 10)
    theirs = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=4, lora_alpha=2, target_modules=["0"], use_dora=dora)
    )
    layer = theirs.base_model.model[0]
    nn.init.normal_(layer.lora_B.default.weight)
    ours = LoraLinear(nn.Linear(12, 10), AdapterSize(4, 0.5, dora))
    values = {"lora_a": layer.lora_A.default.weight, "lora_b": layer.lora_B.default.weight}
    values |= {"weight": layer.base_layer.weight, "bias": layer.base_layer.bias}
    if dora:
        layer.lora_magnitude_vector.default.weight.data.mul_(1.3)
        values["magnitude"] = layer.lora_magnitude_vector.default.weight
    with torch.no_grad():
        for name, value in values.items():
            ours.get_parameter(name).copy_(value)
    x = torch.randn(3, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x))
    (ours(x) ** 3).sum().backward()
    (theirs(x) ** 3).sum().backward()
    for name, value in values.items():
        if name in ("lora_a", "lora_b", "magnitude"):
            torch.testing.assert_close(ours.get_parameter(name).grad, value.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_strength_leads_from_the_base_to_the_adapted_layer(dora: bool) -> None:
    x, base, found = torch.randn(4, 12), nn.Linear(12, 10), {}
    for strength in (0.0, 0.25, 1.0):
        layer = LoraLinear(base, AdapterSize(4, 0.5, dora, strength))
        for i, kind in enumerate(("lora_a", "lora_b", "magnitude")[: 3 if dora else 2]):
            nn.init.normal_(layer.get_parameter(kind), generator=torch.Generator().manual_seed(i))
        found[strength] = layer(x)
    torch.testing.assert_close(found[0.0], base(x))
    torch.testing.assert_close(found[0.25], torch.lerp(found[0.0], found[1.0], 0.25))


@pytest.mark.parametrize("base", ["int8", "fp8", "nf4"])
def test_adapters_train_on_a_base_in_fewer_bits(base: str) -> None:
    sizes = {"hidden_size": 64, "num_heads": 4}
    plain = model(**sizes)
    adapted = model(every(usual_layers(plain)), base, **sizes)
    kept, wanted = predict(adapted, tiny(**sizes)), predict(plain, tiny(**sizes))
    assert within((kept - wanted).norm(), 0.1 * wanted.norm())
    codes = [p for name, p in adapted.named_parameters() if name.endswith("weight") and not p.is_floating_point()]
    assert len(codes) == sum(isinstance(layer, nn.Linear) for name, layer in plain.named_modules() if "blocks" in name)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = (predict(adapted, tiny(**sizes)) - 1).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_what_is_frozen_is_named_by_patterns() -> None:
    built = model()
    names = [name for name, _ in built.named_parameters()]
    assert frozen_names(built, ["double_blocks.*.txt_attn"], None) == [n for n in names if ".txt_attn." in n]
    assert frozen_names(built, [], ["single_blocks"]) == [n for n in names if not n.startswith("single_blocks")]
    assert frozen_names(built, ["*.bias"], ["final_layer"]) == [
        n for n in names if not n.startswith("final_layer") or n.endswith("bias")
    ]
    with pytest.raises(UserError, match="freeze: 'text' names no parameter"):
        frozen_names(built, ["text"], None)
    with pytest.raises(UserError, match="train_only: 'text' names no parameter"):
        frozen_names(built, [], ["text"])
    with pytest.raises(UserError, match="leave nothing to train"):
        frozen_names(built, ["*"], None)


def test_what_is_frozen_needs_no_masters() -> None:
    built = model()
    freeze(built, dict.fromkeys(["img_in.weight"]), torch.bfloat16)
    assert {name for name, p in built.named_parameters() if p.dtype == torch.bfloat16} == {"img_in.weight"}
    assert not built.img_in.weight.requires_grad


def test_rslora_acts_with_alpha_over_the_root_of_the_rank() -> None:
    assert LoraConfig(rank=16, alpha=8).scaling == 0.5
    assert LoraConfig(rank=16, alpha=8, rslora=True).scaling == 2.0
