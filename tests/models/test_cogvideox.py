"""CogVideoX against diffusers and CogVideoX-Fun, and what it promises about sizes, dtypes, conditions and cost."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import UserError
from longtake.models.build import build_denoiser
from longtake.models.cogvideox import CogVideoX
from longtake.models.cogvideox_config import CogVideoXConfig, published_config, section_of
from longtake.models.cogvideox_positions import GridRotations, LearnedPositions, SinePositions, region_in, resized
from longtake.weights.cogvideox import DIFFUSERS, FORMAT
from longtake.weights.conversion import ConvertedWeights
from tests.models.golden_cogvideox import (
    FOLDER,
    KINDS,
    VARIANTS,
    golden_io,
    golden_model,
    inputs_of,
    random_inputs,
    tiny_config,
)
from tests.models.initialised import initialise
from tests.precision import rounding

close = partial(torch.testing.assert_close, rtol=0)


@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_the_reference(kind: str, attention: str) -> None:
    model, tensors = golden_model(kind, attention=attention), golden_io(kind)
    for case in [case for case in ("a", "b") if f"{case}.out.sample" in tensors]:
        with torch.no_grad():
            out = model(*inputs_of(model.config, tensors, case)).transpose(1, 2)
        close(out, tensors[f"{case}.out.sample"], atol=2e-5)
    x, t, conditions = inputs_of(model.config, tensors, "a")
    x = x.requires_grad_()
    conditions = conditions.map(lambda value: value.requires_grad_())
    (model(x, t, conditions).transpose(1, 2) * tensors["a.probe"]).sum().backward()
    of_x = torch.cat([x.grad, *(value.grad for name, value in conditions.items() if name != "text")], dim=1)
    expected = {name.removeprefix("a.grad."): value for name, value in tensors.items() if name.startswith("a.grad.")}
    expected["text"] = tensors["a.grad_in.encoder_hidden_states"]
    expected["x"] = tensors["a.grad_in.hidden_states"].transpose(1, 2)
    found = {**published_gradients(model), "text": conditions["text"].grad, "x": of_x[:, : expected["x"].shape[1]]}
    for name, gradient in expected.items():
        close(found[name], gradient, atol=float(1e-4 * gradient.abs().max()), msg=name)
    norms = json.loads((FOLDER / "transformer" / "grad_norms.json").read_text())[kind]
    assert len(norms) == sum(not name.endswith("pos_embedding") for name in found) - 2
    for name, norm in norms.items():
        assert found[name].norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-3), name


def published_gradients(model: CogVideoX) -> dict[str, torch.Tensor]:
    """By the names and in the shapes of diffusers."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return ConvertedWeights(FORMAT, gradients, model.config, DIFFUSERS)


def reference_of(config: CogVideoXConfig, model: CogVideoX) -> torch.nn.Module:
    """diffusers' model with the same weights."""
    diffusers = pytest.importorskip("diffusers.models.transformers.cogvideox_transformer_3d")
    settings = {key: value for key, value in published_config(config).items() if key[0] != "_"}
    settings.pop("add_noise_in_inpaint_model", None)
    reference = diffusers.CogVideoXTransformer3DModel(**settings)
    reference.load_state_dict(ConvertedWeights(FORMAT, model.state_dict(), config, DIFFUSERS))
    return reference


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("2b", (3, 8, 12)),
        ("2b", (1, 4, 10)),
        ("5b", (3, 8, 12)),
        ("5b", (2, 4, 10)),
        ("5b_i2v", (3, 8, 12)),
        ("5b_i2v", (2, 8, 12)),
        ("5b_i2v", (5, 8, 12)),
        ("1.5", (4, 6, 6)),
        ("1.5_i2v", (2, 8, 4)),
    ],
)
def test_outputs_and_gradients_equal_those_of_diffusers(variant: str, size: tuple[int, int, int]) -> None:
    config = tiny_config(variant)
    model = CogVideoX(config)
    initialise(model, 0)
    for positions in (model.video_positions, model.text_positions):
        if isinstance(positions, LearnedPositions):
            torch.nn.init.normal_(positions.table)
    reference = reference_of(config, model)
    x, t, conditions = random_inputs(config, size)
    grid = tuple(length // patch for length, patch in zip(size, config.patch, strict=True))
    rope = None
    if model.rotations is not None:
        rope = tuple(table.repeat_interleave(2, -1) for table in model.rotations(grid, x.device))
        expected = rotations_of_diffusers(config, size)
        for found, wanted in zip(rope, expected, strict=True):
            close(found, wanted, atol=1e-5)
        rope = expected
    seen = torch.cat([x, *(value for name, value in conditions.items() if name != "text")], dim=1).transpose(1, 2)
    ofs = None if config.ofs_embed_dim is None else torch.full((1,), 2.0)
    wanted = reference(seen, conditions["text"], t, ofs=ofs, image_rotary_emb=rope).sample
    out = model(x, t, conditions).transpose(1, 2)
    close(out, wanted, atol=2e-5)
    probe = torch.randn_like(out)
    (out * probe).sum().backward()
    (wanted * probe).sum().backward()
    found = published_gradients(model)
    for name, parameter in reference.named_parameters():
        close(found[name], parameter.grad, atol=float(1e-4 * parameter.grad.abs().max() + 1e-5), msg=name)
    if model.text_positions is not None:  # a buffer there, unused at lengths other than its own
        assert found["patch_embed.pos_embedding"].any() == (size[0] == config.base_grid[0])


def rotations_of_diffusers(config: CogVideoXConfig, size: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What diffusers' pipeline gives the model."""
    from types import SimpleNamespace

    from diffusers import CogVideoXPipeline

    place = SimpleNamespace(vae_scale_factor_spatial=8, transformer=SimpleNamespace(config=config))
    rows, columns = (8 * side for side in size[1:])
    return CogVideoXPipeline._prepare_rotary_positional_embeddings(place, rows, columns, size[0], torch.device("cpu"))


def test_a_folder_of_33_channels_has_the_positions_of_fun_unless_it_says_otherwise() -> None:
    """Those of CogVideoX-Fun V1.0 lack the key that V1.1 brought."""
    facts = json.loads((FOLDER / "transformer" / "fun_inp_2b" / "config.json").read_text())
    del facts["add_noise_in_inpaint_model"]
    assert section_of(facts, "config.json")["positions"] == "fun"
    for positions in ("fun", "diffusers"):
        config = tiny_config("fun_inp_2b", positions=positions)
        assert CogVideoXConfig(**section_of(published_config(config), "config.json")) == config


def at_480x720(law: str, **changes: Any) -> CogVideoXConfig:
    """A model of 60 x 90 latents with the positions of a library."""
    return CogVideoXConfig(num_attention_heads=1, positions="fun" if law == "fun" else "diffusers", **changes)


@pytest.mark.parametrize("table", ["rope_rows", "sincos_rows"])
def test_positions_equal_the_tables_of_both_libraries_at_their_sizes(table: str) -> None:
    tensors = load_file(FOLDER / "tables" / f"{table}.safetensors")
    names = [name.removesuffix(".rows") for name in tensors if name.endswith(".rows") and "1920" not in name]
    assert len(names) == (12 if table == "rope_rows" else 10)
    for name in names:
        law, size = name.split(".")
        rows, columns = (int(side) // 16 for side in size.split("x"))
        if table == "sincos_rows":
            found = SinePositions(at_480x720(law))((5, rows, columns), torch.device("cpu"))
            tables = {"values": found[0]}
        else:
            config = at_480x720(law, patch_size_t=2 if law == "slice" else None)
            found = GridRotations(config)((6 if law == "slice" else 13, rows, columns), torch.device("cpu"))
            tables = dict(zip(("cos", "sin"), found.repeat_interleave(2, -1), strict=True))
        for part, values in tables.items():
            close(values[tensors[f"{name}.rows"]], tensors[f"{name}.{part}"], atol=1e-5)
            total = tensors[f"{name}.sum" if part == "values" else f"{name}.{part}_sum"]
            torch.testing.assert_close(values.double().sum(0), total, rtol=0, atol=1e-5 * len(values))


def test_a_grid_is_resized_into_the_models_own_as_published() -> None:
    cases = json.loads((FOLDER / "tables" / "crop_regions.json").read_text())["regions"]
    for case in cases:
        (top, left), (bottom, right) = case["region"]
        assert region_in(case["base"], case["grid"]) == [(top, bottom), (left, right)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 7, 10), (2, 20, 6)])
def test_any_latent_size_comes_back_in_its_own_shape(variant: str, size: tuple[int, int, int]) -> None:
    config = tiny_config(variant)
    model = CogVideoX(config)
    initialise(model, 0)
    x, t, conditions = random_inputs(config, size)
    out = model(x, t, conditions)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


def test_sizes_that_patches_do_not_divide_are_filled_up_with_zeros_and_cut_afterwards() -> None:
    model = CogVideoX(tiny_config("1.5"))
    initialise(model, 0)
    x, t, conditions = random_inputs(model.config, (3, 5, 7))
    whole = model(torch.nn.functional.pad(x, (0, 1, 0, 1, 0, 1)), t, conditions)
    assert torch.equal(model(x, t, conditions), whole[:, :, :3, :5, :7])


def test_bf16_weights_take_fp32_inputs_and_tell_close_timesteps_apart() -> None:
    model = CogVideoX(tiny_config("fun_inp_5b"))
    initialise(model, 0)
    x, t, conditions = random_inputs(model.config)
    exact = model(x, t, conditions)
    rounded = model.bfloat16()(x, t, conditions)
    bound = rounding(float(exact.detach().abs().max()), steps=2, dtype=torch.bfloat16)  # of two blocks
    torch.testing.assert_close(rounded.float(), exact, atol=bound, rtol=0)
    assert torch.equal(t[1:].bfloat16(), t[1:].bfloat16() + 1)
    assert not torch.equal(model(x, t + 1, conditions), rounded)


@pytest.mark.parametrize(("variant", "name"), [("2b", "text"), ("fun_inp_2b", "visual"), ("fun_control", "control")])
def test_a_missing_or_misshapen_condition_is_named(variant: str, name: str) -> None:
    model = CogVideoX(tiny_config(variant))
    x, t, conditions = random_inputs(model.config)
    with pytest.raises(UserError, match=f"condition `{name}`, which was not given"):
        model(x, t, conditions.updated(**{name: None}))
    with pytest.raises(UserError, match=f"condition `{name}` has shape"):
        model(x, t, conditions.updated(**{name: conditions[name][..., :3]}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_flops_equal_the_counter_of_torch(variant: str) -> None:
    config = tiny_config(variant, attention="math")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x, t, conditions = random_inputs(config, (4, 5, 6))
        build_denoiser(config)(x, t, conditions)
    assert counter.get_total_flops() == 2 * CogVideoX.forward_flops(config, (4, 4, 5, 6), 5)


@pytest.mark.parametrize(("layers", "heads", "visual", "billions"), [(30, 30, None, 1.694), (42, 48, "inpaint", 5.570)])
def test_full_sizes_have_the_published_number_of_parameters(
    layers: int, heads: int, visual: Any, billions: float
) -> None:
    config = CogVideoXConfig(
        num_layers=layers, num_attention_heads=heads, visual=visual, use_rotary_positional_embeddings=heads == 48
    )
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_denoiser(config).parameters())
    assert round(count / 1e9, 3) == billions


def test_a_traced_model_gives_the_same_answer() -> None:
    model = CogVideoX(tiny_config("5b"))
    initialise(model, 0)
    inputs = random_inputs(model.config)
    traced = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("grid", [(2, 4, 6), (3, 7, 5), (1, 2, 9), (6, 3, 3)])
def test_a_learned_table_is_resized_as_interpolation_does_with_its_gradient(grid: tuple[int, ...]) -> None:
    table = torch.randn(3, 4, 6, 5, dtype=torch.float32, requires_grad=True)
    expected = F.interpolate(table.permute(3, 0, 1, 2)[None], grid, mode="trilinear")[0].permute(1, 2, 3, 0)
    upstream = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, table, upstream)
    found = resized(table, grid)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, table, upstream)[0], wanted, rtol=0, atol=1e-5)
