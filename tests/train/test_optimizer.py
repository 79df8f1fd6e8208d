"""AdamW, clipping and averages on local shards, against PyTorch's own and Open-Sora's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from longtake.train.optimizer import Ema, ShardedAdamW, clip_scale
from tests.train.test_schedule import run_config

GOLDEN = Path(__file__).parents[1] / "golden" / "opensora_v2" / "ema.safetensors"


def model_of(*shapes: tuple[int, ...]) -> nn.Module:
    """Parameters of these shapes and nothing else, with fixed values."""
    random = torch.Generator().manual_seed(0)
    model = nn.Module()
    for number, shape in enumerate(shapes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=random)))
    return model


def give_gradients(model: nn.Module, seed: int) -> list[Tensor]:
    """The same gradients for the same seed."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    return [parameter.grad for parameter in model.parameters()]


def test_steps_equal_those_of_torch_with_its_clipping() -> None:
    ours, theirs = model_of((3, 4), (5,)), model_of((3, 4), (5,))
    config = run_config(lr=1e-2, eps=1e-8, optim={"betas": (0.8, 0.95), "weight_decay": 0.1})
    sharded = ShardedAdamW(ours, config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1e-8, betas=(0.8, 0.95), weight_decay=0.1)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        norm = sharded.grad_square_sum().sqrt()
        assert norm == pytest.approx(float(expected), rel=1e-6)
        sharded.step(1e-2, clip_scale(norm, 1.0))
        reference.step()
        assert all(p.grad is None for p in ours.parameters())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_short_gradient_is_not_stretched() -> None:
    assert clip_scale(torch.tensor(0.25), 1.0) == 1
    assert clip_scale(torch.tensor(0.0), 1.0) == 1
    assert clip_scale(torch.tensor(4.0), 1.0) == pytest.approx(0.25, rel=1e-6)


def test_state_read_into_a_new_optimizer_goes_on_bit_by_bit() -> None:
    first, second = model_of((4, 3)), model_of((4, 3))
    config = run_config(lr=1e-2, eps=1e-8)
    ours, theirs = ShardedAdamW(first, config), ShardedAdamW(second, config)
    for step in range(3):
        give_gradients(first, step)
        ours.step(1e-2, None)
    second.load_state_dict(first.state_dict())
    for name, tensor in theirs.state().items():
        tensor.copy_(ours.state()[name])
    theirs.set_updates(3)
    for model, optimizer in ((first, ours), (second, theirs)):
        give_gradients(model, 3)
        optimizer.step(1e-2, None)
    assert torch.equal(first.p0, second.p0)


def test_frozen_parameters_have_neither_updates_nor_averages() -> None:
    model = model_of((2,), (3,))
    model.p1.requires_grad_(False)
    before = model.p1.clone()
    optimizer, ema = ShardedAdamW(model, run_config()), Ema(model, 0.9)
    model.p0.grad = torch.ones(2)
    optimizer.step(1e-2, None)
    ema.update(1)
    assert torch.equal(model.p1, before)
    assert set(ema.state()) == {"ema.p0"}
    assert set(optimizer.state()) == {"optim.p0.exp_avg", "optim.p0.exp_avg_sq"}


def test_averages_of_opensora_are_met() -> None:
    golden = load_file(GOLDEN)
    with safe_open(GOLDEN, framework="pt") as file:
        decays = json.loads(file.metadata()["info"])["decays"]
    model = nn.Module()
    model.weight = nn.Parameter(golden["ema.0.weight"].clone())
    for number, decay in enumerate(decays, start=1):
        ema = Ema(model, decay, ramp=False)
        ema.averages["weight"].copy_(golden[f"ema.{number - 1}.weight"])
        model.weight.data.copy_(golden[f"model.{number}.weight"])
        ema.update(number)
        torch.testing.assert_close(ema.averages["weight"], golden[f"ema.{number}.weight"], rtol=0, atol=1e-6)


def test_the_average_of_a_young_run_follows_quickly() -> None:
    model = model_of((3,))
    ema, expected = Ema(model, 0.99), model.p0.detach().double().clone()
    for count in range(1, 30):
        model.p0.data += 0.1 * count
        ema.update(count)
        decay = min(0.99, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * model.p0.detach().double()
    torch.testing.assert_close(ema.averages["p0"].double(), expected, rtol=1e-6, atol=1e-6)


def test_an_average_restarts_at_the_weights() -> None:
    model = model_of((3,))
    ema = Ema(model, 0.9)
    model.p0.data += 1
    ema.restart()
    assert torch.equal(ema.averages["p0"], model.p0)
    model.p0.data += 1
    assert not torch.equal(ema.averages["p0"], model.p0)
