"""The MMDiT against the reference, and what it promises about sizes, dtypes, conditions and cost."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import UserError
from longtake.models.build import build_denoiser
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from tests.models.golden import (
    CASES,
    FOLDER,
    assert_equals_golden,
    golden_case,
    golden_model,
    random_inputs,
    tiny_config,
)
from tests.models.initialised import initialise

FULL_SIZE = {
    "open_sora_v2": MMDiTConfig(cond_embed=True),
    "video_dc_ae": MMDiTConfig(cond_embed=True, patch_size=1, in_channels=128),
    "flux_dev": MMDiTConfig(guidance_embed=True, fused_qkv=True, use_liger_rope=False),
}


@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_output_and_gradients_equal_the_reference(kind: str, case: str, attention: str) -> None:
    golden = golden_case(kind, case, attention=attention)
    assert_equals_golden(golden, golden_model(kind, golden.config))


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_models_have_the_names_shapes_and_counts_of_the_reference(name: str) -> None:
    expected = json.loads((FOLDER / "mmdit_state_keys.json").read_text())[name]
    with torch.device("meta"):
        state = build_denoiser(FULL_SIZE[name]).state_dict()
    shapes = {re.sub(r"_blocks\.\d+\.", "_blocks.*.", key): list(tensor.shape) for key, tensor in state.items()}
    assert shapes == expected["shapes"]
    assert len(state) == expected["num_tensors"]
    assert sum(tensor.numel() for tensor in state.values()) == expected["num_parameters"]


def test_import_loads_no_package_that_a_model_does_not_need() -> None:
    code = (
        "import sys; from longtake.models.mmdit import MMDiT; "
        "print([m for m in ('av', 'pyarrow', 'safetensors', 'tensorboard', 'typer', 'wandb') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 3, 4), (3, 4, 5), (2, 7, 3)])
@pytest.mark.parametrize("patch", [1, 2])
def test_any_latent_size_comes_back_in_its_own_shape(size: tuple[int, int, int], patch: int) -> None:
    config = tiny_config(patch_size=patch, cond_embed=True)
    model = MMDiT(config)
    x, t, conditions = random_inputs(config, size)
    out = model(x, t, conditions)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


def test_odd_sizes_are_filled_up_with_zeros_and_cut_afterwards() -> None:
    config = tiny_config()
    model = MMDiT(config)
    x, t, conditions = random_inputs(config, (2, 3, 5))
    whole = model(torch.nn.functional.pad(x, (0, 1, 0, 1)), t, conditions)
    assert torch.equal(model(x, t, conditions), whole[..., :3, :5])


def test_a_sample_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    config = tiny_config(cond_embed=True, guidance_embed=True)
    model = MMDiT(config)
    x, t, c = random_inputs(config, batch=3)
    together = model(x, t, c)
    alone = model(x[1:2], t[1:2], c.map(lambda tensor: tensor[1:2]))
    torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=0)


def test_bf16_weights_take_fp32_inputs_and_tell_close_timesteps_apart() -> None:
    config = tiny_config(cond_embed=True, guidance_embed=True)
    model = MMDiT(config)
    initialise(model, 0)
    x, _, conditions = random_inputs(config)
    t = torch.tensor([0.25, 0.75])
    exact = model(x, t, conditions)
    rounded = model.bfloat16()(x, t, conditions)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.05)
    close = t + 2e-4
    assert torch.equal(t.bfloat16(), close.bfloat16())
    assert not torch.equal(model(x, close, conditions), rounded)


def test_bf16_timesteps_are_refused() -> None:
    config = tiny_config()
    x, t, conditions = random_inputs(config)
    with pytest.raises(AssertionError, match="float32"):
        MMDiT(config)(x, t.bfloat16(), conditions)


@pytest.mark.parametrize("name", ["text", "vector", "guidance", "visual"])
def test_a_missing_condition_is_named(name: str) -> None:
    config = tiny_config(cond_embed=True, guidance_embed=True)
    x, t, conditions = random_inputs(config)
    with pytest.raises(UserError, match=f"condition `{name}`, which was not given"):
        MMDiT(config)(x, t, conditions.updated(**{name: None}))


def test_conditions_the_model_does_not_embed_change_nothing() -> None:
    config = tiny_config()
    model = MMDiT(config)
    x, t, conditions = random_inputs(config)
    assert torch.equal(model(x, t, conditions), model(x, t, conditions.updated(guidance=None, visual=None)))


def test_a_condition_of_the_wrong_shape_is_named_with_the_right_one() -> None:
    config = tiny_config(cond_embed=True)
    x, t, conditions = random_inputs(config)
    with pytest.raises(UserError, match=re.escape("condition `visual` has shape [2, 4, 2, 4, 6]; the MMDiT model")):
        MMDiT(config)(x, t, conditions.updated(visual=conditions["visual"][:, 1:]))
    with pytest.raises(UserError, match=re.escape("needs [2, any, 32]")):
        MMDiT(config)(x, t, conditions.updated(text=conditions["text"][..., :31]))


def test_latents_with_other_channels_say_which_in_channels_would_fit() -> None:
    config = tiny_config()
    x, t, conditions = random_inputs(config)
    with pytest.raises(UserError, match=r"in_channels = 16: the latents have 3 channels; .* needs in_channels = 12"):
        MMDiT(config)(x[:, :3], t, conditions)


@pytest.mark.parametrize("changes", [{}, {"fused_qkv": True, "guidance_embed": True}, {"cond_embed": True}])
@pytest.mark.parametrize("size", [(1, 4, 4), (3, 5, 6)])
def test_forward_flops_equal_the_counter_of_torch(changes: dict, size: tuple[int, int, int]) -> None:
    config = tiny_config(attention="math", **changes)
    model = MMDiT(config)
    x, t, conditions = random_inputs(config, size, batch=2, text_tokens=7)
    with FlopCounterMode(display=False) as counter:
        model(x, t, conditions)
    assert counter.get_total_flops() == 2 * MMDiT.forward_flops(config, (config.latent_channels, *size), 7)


def test_forward_flops_of_the_11b_model_match_its_published_size() -> None:
    """12.91 GFLOP a token in linear layers, 4 S^2 3072 in each of 57 attentions, within 2 % of the exact count."""
    video, text = 33 * 24 * 42, 512
    total = video + text
    rough = 12.91e9 * total + 57 * 4 * total**2 * 3072
    exact = MMDiT.forward_flops(FULL_SIZE["open_sora_v2"], (16, 33, 48, 84), text)
    assert abs(exact / rough - 1) < 0.02


def test_positions_made_while_sampling_serve_training_too() -> None:
    config = tiny_config()
    model = MMDiT(config)
    inputs = random_inputs(config)
    with torch.inference_mode():
        model(*inputs)
    model(*inputs).sum().backward()
    assert model.img_in.weight.grad is not None


def test_the_model_is_built_and_traced_on_the_meta_device() -> None:
    config = tiny_config(cond_embed=True)
    with torch.device("meta"):
        model = build_denoiser(config)
    x, t, c = random_inputs(config)
    meta = c.updated(guidance=None).map(lambda tensor: tensor.to("meta"))
    assert model(x.to("meta"), t.to("meta"), meta).shape == x.shape
    model.to_empty(device="cpu")
    initialise(model, 3)
    assert torch.isfinite(model(x, t, c)).all()


def test_a_traced_model_gives_the_same_answer() -> None:
    config = tiny_config(cond_embed=True)
    model = MMDiT(config)
    inputs = random_inputs(config)
    traced = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-6, rtol=0)
