"""Initial values are a function of seed and name alone."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from longtake import random
from longtake.models import initial
from longtake.models.mmdit import MMDiT
from longtake.random import parameter_uniforms
from tests.models.golden import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.precision import within


def values(seed: int, **changes: object) -> dict[str, torch.Tensor]:
    model = MMDiT(tiny_config(**changes))
    initialise(model, seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    first = values(7)
    torch.manual_seed(2)
    second = values(7, depth=3, cond_embed=True)  # more blocks and layers do not move the draws of the others
    assert first.keys() < second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["img_in.weight"], values(8)["img_in.weight"])
    assert not torch.equal(first["single_blocks.0.q_proj.weight"], first["single_blocks.1.q_proj.weight"])


@pytest.mark.parametrize("count", [1, 7, 4096, 3 * 5 * 1031])
def test_a_device_draws_the_bits_that_numpy_draws(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "_BLOCKS_AT_ONCE", 1000)
    for seed, name in ((0, "img_in.weight"), (2**40 + 1, "double_blocks.18.txt_mlp.2.bias")):
        found = initial.uniforms_on(torch.device("cpu"), seed, name, count)
        assert torch.equal(found, torch.from_numpy(parameter_uniforms(seed, name, count)))


UNIFORMS = (
    "9f31ab58aff68951541cd77d99e5f9f5c3e0d80843d7896c39e94fac16b68670"  # SHA-256, drawn in one piece by one thread
)


@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_of_a_parameter_do_not_depend_on_threads_or_pieces(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "num_threads", lambda: threads)
    name, count = "blocks.0.weight", 1_000_003
    drawn = parameter_uniforms(7, name, count)
    assert hashlib.sha256(drawn.tobytes()).hexdigest() == UNIFORMS
    whole = random.normals(7, 0, random.Purpose.WEIGHTS, 0, random.hash64(name), count)[0]
    assert random.parameter_normals(7, name, count).tobytes() == whole.tobytes()


def test_cores_are_shared_with_other_processes_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    assert random.num_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert random.num_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert random.num_threads() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_starts_with_the_values_of_a_cpu() -> None:
    alone = initial.linear_uniform("x.weight", (3072, 515), 515, 7)
    with torch.device("cuda"):
        there = initial.linear_uniform("x.weight", (3072, 515), 515, 7)
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), alone)


def test_one_parameter_can_be_drawn_without_the_model_in_memory() -> None:
    with torch.device("meta"):
        model = MMDiT(tiny_config())
    name = "double_blocks.0.txt_mlp.2.weight"
    found = model.initial_value(name, model.get_parameter(name).shape, 7)
    assert found.device.type == "cpu"
    assert torch.equal(found, values(7)[name])


def test_linear_layers_follow_torchs_law_and_the_rest_the_references() -> None:
    found = values(0, cond_embed=True, guidance_embed=True, hidden_size=128, num_heads=8)
    weight = found["double_blocks.0.img_mlp.2.weight"]  # fan in 512
    assert weight.abs().max() <= 512**-0.5
    assert abs(weight.std() / (512**-0.5 / 3**0.5) - 1) < 0.02
    assert within(abs(weight.mean()), 1e-3)
    assert found["double_blocks.0.img_mlp.2.bias"].abs().max() <= 512**-0.5
    assert not found["cond_in.weight"].any()
    assert not found["cond_in.bias"].any()
    assert (found["single_blocks.1.norm.key_norm.scale"] == 1).all()
    zero = {name for name, value in found.items() if not value.any()}
    assert zero == {"cond_in.weight", "cond_in.bias"}


@pytest.mark.parametrize("fused", [False, True])
def test_zero_gate_starts_as_zero_but_learns(fused: bool) -> None:
    config = tiny_config(init="zero_gate", fused_qkv=fused)
    model = MMDiT(config)
    initialise(model, 0)
    zero = {name.rpartition(".")[0].split(".")[-1] for name, p in model.named_parameters() if not p.any()}
    assert zero == {"lin", "linear", "1"}
    x, t, conditions = random_inputs(config)
    out = model(x, t, conditions)
    assert not out.any()
    (out - x).square().mean().backward()
    assert model.final_layer.linear.bias.grad.any()
