"""Averaged weights, against Open-Sora's numbers and the formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from longtake.train.optimizer.ema import Ema
from tests.precision import rounding
from tests.train.optimizer.test_sharded import model_of

FOLDER = Path(__file__).parents[2] / "golden"
GOLDEN = FOLDER / "opensora_v2" / "ema.safetensors"


def bound(average: torch.Tensor) -> float:
    """Of an average that is two products and a sum."""
    return rounding(float(average.abs().max()), steps=3)


def test_averages_of_opensora_1_2_are_met_and_what_does_not_train_is_left() -> None:
    golden = load_file(FOLDER / "opensora_v1_2" / "ema.safetensors")
    for decay in (0.9, 0.99, 0.9999):
        model = nn.Module()
        for name in ("weight", "bias"):
            model.register_parameter(name, nn.Parameter(golden[f"ema.0.{name}"].clone()))
        model.frozen = nn.Parameter(golden["ema.0.frozen"].clone(), requires_grad=False)
        ema = Ema(model, decay, ramp=False)
        assert sorted(ema.averages) == ["bias", "weight"]
        for number in (1, 2, 3):
            for name in ema.averages:
                getattr(model, name).data.copy_(golden[f"model.{number}.{name}"])
            ema.update(number)
            for name, average in ema.averages.items():
                expected = golden[f"decay{decay}.ema.{number}.{name}"]
                torch.testing.assert_close(average, expected, rtol=0, atol=bound(expected))


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
        expected = golden[f"ema.{number}.weight"]
        torch.testing.assert_close(ema.averages["weight"], expected, rtol=0, atol=bound(expected))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_that_the_host_keeps_is_the_same(dtype: torch.dtype) -> None:
    model = model_of((40, 30), (7,), (0, 3), dtype=dtype)
    resident, kept = Ema(model, 0.99), Ema(model, 0.99, offload=True)
    for count in range(1, 5):
        for p in model.parameters():
            p.data += 0.1 * count
        for ema in (resident, kept):
            ema.update(count, torch.tensor(float(count == 2)))
    for name, average in resident.averages.items():
        assert average.dtype == torch.float32
        assert torch.equal(kept.averages[name], average)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_left_out_leaves_the_average(dtype: torch.dtype) -> None:
    model = model_of((40, 30), dtype=dtype)
    ema, plain = Ema(model, 0.9), Ema(model, 0.9)
    model.p0.data += 1
    before = ema.averages["p0"].clone()
    ema.update(3, torch.tensor(1.0))
    assert torch.equal(ema.averages["p0"], before)
    ema.update(3, torch.tensor(0.0))
    plain.update(3)
    assert torch.equal(ema.averages["p0"], plain.averages["p0"])
