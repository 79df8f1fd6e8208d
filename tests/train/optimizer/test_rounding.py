"""Stochastic rounding: unbiased, and a pure function of seed, parameter, element and update."""

from __future__ import annotations

import torch
from torch import Tensor

from longtake.train.optimizer.rounding import random_bits, round_stochastically, rounding_key
from tests.precision import within

CPU = torch.device("cpu")


def bits(seed: int = 0, name: str = "a", start: int = 0, update: int = 1, count: int = 1 << 14) -> Tensor:
    return random_bits(rounding_key(seed, name, start, CPU), torch.tensor(float(update)), count)


def test_numbers_are_rounded_up_as_often_as_their_rest_says() -> None:
    low, high = 1.0, 1.0 + 2**-7  # neighbours in bfloat16
    for share in (0.1, 0.5, 0.9):
        values = torch.full((1 << 14,), low + share * (high - low))
        rounded = round_stochastically(values, bits()).float()
        assert set(rounded.tolist()) == {low, high}
        assert abs((rounded == high).float().mean().item() - share) < 0.015
        assert torch.equal(round_stochastically(-values, bits()).float(), -rounded)


def test_what_bfloat16_holds_is_left_alone() -> None:
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:3] = torch.tensor([0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(values.float(), bits()), values)


def test_updates_below_the_last_bit_are_kept_on_average() -> None:
    weights = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    for update in range(1, 101):
        weights = round_stochastically(weights.float() + 1e-4, bits(update=update, count=4096))
    assert within(abs(weights.float().mean().item() - 1.01), 5e-4)
    nearest = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert torch.equal((nearest.float() + 1e-4).bfloat16(), nearest)


def test_a_shard_has_the_bits_of_its_part_of_the_whole() -> None:
    assert torch.equal(bits(start=1000, count=500), bits(count=1500)[1000:])


def test_bits_differ_by_seed_name_element_and_update() -> None:
    ours = bits() & 0xFFFF
    for theirs in (bits(seed=1), bits(name="b"), bits(update=2), bits(start=1), bits(start=1 << 14)):
        other = theirs & 0xFFFF
        assert within((ours == other).float().mean(), 1e-3)
        together = torch.stack([ours, other]).float()
        assert abs(torch.corrcoef(together)[0, 1]) < 0.03


def test_bits_are_even() -> None:
    counts = torch.bincount((bits(count=1 << 16) & 0xFFFF) >> 8, minlength=256).float()
    assert ((counts - 256).square() / 256).sum() < 340  # chi-square with 255 degrees: 330 at one in a thousand
