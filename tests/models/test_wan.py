"""Wan against the authors' code and diffusers, and what it guarantees about sizes, dtypes, conditions and cost."""

from __future__ import annotations

import copy
import json
import random
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import UserError
from longtake.models import layers
from longtake.models.build import build_denoiser
from longtake.models.lora import AdapterSize, adapt, target_layers
from longtake.models.wan import THETA, Wan, time_features
from longtake.models.wan_config import WanConfig, official_config, published_config, section_of
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.references import wan as reference_of
from longtake.weights.wan import DIFFUSERS, FORMAT
from tests.models.golden_wan import (
    FOLDER,
    KINDS,
    TINY,
    VARIANTS,
    golden_model,
    inputs_of,
    random_inputs,
    read_golden,
    tiny_config,
)
from tests.models.initialised import initialise
from tests.precision import in_float64, within

close = partial(torch.testing.assert_close, rtol=0)


def published_gradients(model: Wan) -> dict[str, Tensor]:
    """By the names of diffusers."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return ConvertedWeights(FORMAT, gradients, model.config, DIFFUSERS)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_the_reference(kind: str) -> None:
    model, (_, norms, tensors) = golden_model(kind), read_golden(kind)
    for case in [case for case in ("a", "b") if f"{case}.out.sample" in tensors]:
        with torch.no_grad():
            close(model(*inputs_of(model.config, tensors, case)), tensors[f"{case}.out.sample"], atol=5e-5)
    x, t, conditions = inputs_of(model.config, tensors, "a")
    x = x.requires_grad_()
    conditions = conditions.map(lambda value: value.requires_grad_() if value.is_floating_point() else value)
    (model(x, t, conditions) * tensors["a.probe"]).sum().backward()
    found = dict(published_gradients(model))
    for name, norm in norms.items():
        assert found[name].norm().item() == pytest.approx(norm, rel=2e-4, abs=1e-4), name
    found |= {"hidden_states": x.grad, "text0": conditions["text"].grad[0]}
    expected = {n.partition(".grad")[2].removeprefix("_in")[1:]: v for n, v in tensors.items() if ".grad" in n}
    for name, gradient in expected.items():
        rows = found[name][: len(gradient)]
        close(rows, gradient, atol=float(2e-4 * gradient.abs().max()), msg=name)


def test_bf16_is_no_farther_from_float32_than_the_references() -> None:
    tensors = read_golden("t2v")[2]
    model = golden_model("t2v").bfloat16()
    x, t, conditions = inputs_of(model.config, tensors, "a")
    exact = tensors["a.out.sample"]
    out = model(x, t, conditions)
    assert out.dtype == torch.float32
    theirs = [(tensors[f"half.{name}"] - exact[:1]).abs().max() for name in ("official_autocast", "diffusers_bf16")]
    assert within((out[:1] - exact[:1]).abs().max(), 1.5 * max(theirs))


def test_time_features_equal_the_official_ones() -> None:
    tensors = load_file(FOLDER / "tables" / "time.safetensors")
    for width in (32, 256):
        close(time_features(tensors["t"], width), tensors[f"official.d{width}"], atol=1e-6)


def test_rotations_equal_the_official_tables() -> None:
    tensors = load_file(FOLDER / "tables" / "rope.safetensors")
    for name in sorted({name.rpartition(".")[0] for name in tensors}):
        width, size = name.split(".")
        config = WanConfig(**TINY | {"attention_head_dim": int(width[1:])})
        grid = tuple(int(side) for side in size.split("x"))
        table = layers.RotaryPositions(config.axes_dim, THETA)(grid, torch.device("cpu"))
        for part, values in zip(("cos", "sin"), table, strict=True):
            rows = tensors.get(f"{name}.rows")
            close(values if rows is None else values[rows], tensors[f"{name}.{part}"], atol=1e-6)
            if rows is not None:
                close(values.double().sum(0), tensors[f"{name}.{part}_sum"], atol=1e-6 * len(values))
        if f"{name}.q" in tensors:
            turned = layers.rotate_interleaved(tensors[f"{name}.q"].float(), table.unsqueeze(2))
            close(turned, tensors[f"{name}.turned"], atol=1e-6)


def published_models() -> dict[str, Any]:
    return json.loads((FOLDER / "keys" / "transformer.json").read_text())["real_models"]


@pytest.mark.parametrize("name", published_models())
def test_full_sizes_have_the_published_parameters_and_tensors(name: str) -> None:
    facts = published_models()[name]
    keys = {key: facts[key] for key in facts if key in WanConfig.model_fields}
    config = WanConfig(**keys)
    assert config.image_dim is None or facts["added_kv_proj_dim"] == config.hidden_size
    with torch.device("meta"):
        parameters = list(build_denoiser(config).parameters())
    assert sum(parameter.numel() for parameter in parameters) == facts["parameters"]
    assert len(parameters) == facts["tensors"]


def compare_with_diffusers(config: WanConfig, size: tuple[int, int, int], seed: int) -> None:
    """Outputs and gradients, in float32 and float64."""
    model = Wan(config)
    initialise(model, seed)
    torch.nn.init.normal_(model.head.head.weight, std=0.2)
    reference = reference_of(config, model.state_dict(), FOLDER)
    x, t, conditions = random_inputs(config, size, seed=seed)
    for dtype, share in ((torch.float32, 5e-5), (torch.float64, 2e-6)):
        if dtype == torch.float64:
            reference.module.double()
            t = t / 1000  # diffusers forms sinusoids in float32, which are off by 4e-5 at t = 1000
        module = reference.module
        module.zero_grad()
        model.zero_grad()
        x, conditions = x.to(dtype), conditions.map(partial(as_floats, dtype=dtype))
        wanted = reference.predict(x, t, conditions)
        probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        (wanted * probe).sum().backward()
        if dtype == torch.float64:
            with in_float64(model):
                out = model(x, t, conditions)
                (out * probe).sum().backward()
                found = {name: value.clone() for name, value in published_gradients(model).items()}
        else:
            out = model(x, t, conditions)
            (out * probe).sum().backward()
            found = dict(published_gradients(model))
        assert out.dtype == dtype
        close(out, wanted, atol=share * float(wanted.detach().abs().max()))
        largest = max(float(parameter.grad.abs().max()) for parameter in module.parameters())
        for name, parameter in module.named_parameters():
            bound = 4 * share * (float(parameter.grad.abs().max()) + 0.01 * largest)
            close(found[name], parameter.grad, atol=bound, msg=name)


def as_floats(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def random_case(variant: str, seed: int) -> tuple[WanConfig, tuple[int, int, int]]:
    numbers = random.Random(f"{variant} {seed}")
    heads, channels = numbers.choice((1, 2, 3, 4)), numbers.choice((3, 4, 6))
    given = variant in ("i2v", "i2v_clip")
    config = tiny_config(
        variant,
        num_layers=numbers.choice((1, 2, 3)),
        num_attention_heads=heads,
        attention_head_dim=numbers.choice((6, 8, 12, 16)),
        ffn_dim=numbers.randrange(8, 64),
        out_channels=channels,
        in_channels=2 * channels + 4 if given else channels,
        text_dim=numbers.randrange(4, 32),
        text_len=512 if variant == "i2v_clip" else numbers.randrange(5, 20),
        freq_dim=numbers.choice((16, 32)),
    )
    return config, (numbers.randrange(1, 5), 2 * numbers.randrange(1, 5), 2 * numbers.randrange(1, 5))


@pytest.mark.parametrize(
    ("variant", "seed"),
    [pytest.param(variant, seed, marks=[pytest.mark.slow] * (seed > 1)) for variant in VARIANTS for seed in range(20)],
)
def test_random_models_equal_those_of_diffusers(variant: str, seed: int) -> None:
    compare_with_diffusers(*random_case(variant, seed), seed)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 5, 7)])
def test_any_latent_size_keeps_its_shape(variant: str, size: tuple[int, int, int]) -> None:
    config = tiny_config(variant)
    model = Wan(config)
    initialise(model, 0)
    x, t, conditions = random_inputs(config, size)
    out = model(x, t, conditions)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


def test_given_frames_are_at_time_zero_and_none_given_is_the_plain_model() -> None:
    config = tiny_config("ti2v")
    model = Wan(config)
    initialise(model, 0)
    torch.nn.init.normal_(model.head.head.weight)
    x, t, conditions = random_inputs(config)
    plain = model(x, t, conditions.updated(x_mask=None))
    free = model(x, t, conditions.updated(x_mask=torch.ones(2, 3, dtype=torch.bool)))
    close(free, plain, atol=1e-5)
    every = model(x, t, conditions.updated(x_mask=torch.zeros(2, 3, dtype=torch.bool)))
    close(every, model(x, torch.zeros_like(t), conditions.updated(x_mask=None)), atol=1e-5)


def test_text_rows_beyond_the_mask_are_zeros_that_are_attended_to() -> None:
    config = tiny_config()
    model = Wan(config)
    initialise(model, 0)
    torch.nn.init.normal_(model.head.head.weight)
    x, t, conditions = random_inputs(config)
    mask = torch.tensor([[True, True, False, False, False]] * 2)
    out = model(x, t, type(conditions)({"text": conditions["text"]}, {"text": mask}))
    close(out, model(x, t, conditions.updated(text=conditions["text"][:, :2])), atol=0.0)
    shorter = Wan(config.model_copy(update={"text_len": 5}))
    shorter.load_state_dict(model.state_dict())
    assert not torch.allclose(shorter(x, t, conditions), model(x, t, conditions))


@pytest.mark.parametrize(("variant", "name"), [("t2v", "text"), ("i2v", "visual"), ("i2v_clip", "image")])
def test_a_missing_or_misshapen_condition_is_named(variant: str, name: str) -> None:
    model = Wan(tiny_config(variant))
    x, t, conditions = random_inputs(model.config)
    with pytest.raises(UserError, match=f"condition `{name}`, which was not given"):
        model(x, t, conditions.updated(**{name: None}))
    with pytest.raises(UserError, match=f"condition `{name}` has shape"):
        model(x, t, conditions.updated(**{name: conditions[name][..., :3]}))


def test_inputs_beyond_the_models_limits_are_refused() -> None:
    model = Wan(tiny_config())
    x, t, conditions = random_inputs(model.config, text_tokens=7)
    with pytest.raises(UserError, match=r"t5.max_length = 6"):
        model(x, t, conditions)
    with pytest.raises(UserError, match="positions for 1024"):
        model(torch.zeros(1, 4, 1025, 2, 2), t[:1], conditions.map(lambda one: one[:1]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_flops_equal_the_counter_of_torch(variant: str) -> None:
    config = tiny_config(variant, attention="math", text_len=5)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x, t, conditions = random_inputs(config, (4, 5, 6))
        build_denoiser(config)(x, t, conditions.updated(x_mask=None))
    assert counter.get_total_flops() == 2 * Wan.forward_flops(config, (4, 4, 5, 6), 5)


@pytest.mark.parametrize("base", ["int8", "fp8", "nf4"])
def test_adapters_train_on_a_quantized_base_as_on_a_dense_one(base: str) -> None:
    config = tiny_config(num_attention_heads=4, attention_head_dim=16, ffn_dim=128)
    found = {}
    for kind in ("dense", base):
        model = Wan(config)
        layer_names = target_layers(model, None, FORMAT.lora_targets)
        adapt(model, dict.fromkeys(layer_names, AdapterSize(4, 1.0)), kind, torch.float32)
        initialise(model, 3)
        torch.nn.init.normal_(model.head.head.weight, generator=torch.Generator().manual_seed(0))
        found[kind] = model(*random_inputs(config))
        assert found[kind].dtype == torch.float32
        found[kind].square().sum().backward()
        with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert with_gradient == {f"{name}.{factor}" for name in layer_names for factor in ("lora_a", "lora_b")}
    assert within((found[base] - found["dense"]).norm(), 0.15 * found["dense"].norm())


def test_a_traced_model_gives_the_same_answer() -> None:
    model = Wan(tiny_config("ti2v"))
    initialise(model, 0)
    inputs = random_inputs(model.config)
    traced = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    close(traced(*inputs), model(*inputs), atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_configs_round_trip(variant: str) -> None:
    config = tiny_config(variant, text_dim=4096, text_len=512)
    if variant != "ti2v":
        assert WanConfig(**section_of(published_config(config), "config.json")) == config
    clip = {} if config.image_dim is None else {"image_dim": config.image_dim}
    assert WanConfig(**section_of(official_config(config), "config.json") | clip) == config


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, "not of a Wan"),
        ({"_class_name": "WanTransformer3DModel", "qk_norm": "rms_norm"}, "qk_norm = 'rms_norm'"),
        ({"_class_name": "WanModel", "eps": 1e-5}, "eps = 1e-05"),
        ({"_class_name": "WanModel", "dim": 100, "num_heads": 16}, "dim = 100"),
        ({"_class_name": "WanModel", "vace_layers": [0, 2]}, "vace_layers"),
        ({"_class_name": "WanTransformer3DModel", "image_dim": 1280, "added_kv_proj_dim": 7}, "added_kv_proj_dim = 7"),
    ],
)
def test_configs_of_other_models_are_refused(facts: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        section_of(facts, "config.json")
