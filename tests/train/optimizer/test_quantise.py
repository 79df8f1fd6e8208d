"""Moments in a byte: levels, errors, blocks."""

from __future__ import annotations

import pytest
import torch

from longtake.train.optimizer.quantise import block_size, dequantise, quantise, scale_shape, table
from tests.precision import within

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_different_levels_in_order(signed: bool) -> None:
    levels, borders, _ = table(signed, CPU)
    assert len(levels) == 256
    assert borders[:-1].isfinite().all()
    assert borders[-1] == torch.inf
    assert (levels.diff() > 0).all()
    assert levels[-1] == 1
    assert levels[0] == (pytest.approx(-0.99297, abs=1e-5) if signed else pytest.approx(1e-7))


def test_the_second_moment_has_no_zero() -> None:
    codes, scales = quantise(torch.tensor([[1.0, 1e-12, 0.0]]), table(False, CPU))
    assert (dequantise(codes, scales, table(False, CPU)) > 0).all()


def test_a_block_of_zeros_stays_zero() -> None:
    for signed in (True, False):
        codes, scales = quantise(torch.zeros(2, 8), table(signed, CPU))
        assert not dequantise(codes, scales, table(signed, CPU)).any()
        assert not dequantise(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2), table(signed, CPU)).any()


@pytest.mark.parametrize("signed", [True, False])
def test_the_error_grows_from_a_few_percent_to_a_third_four_decades_below(signed: bool) -> None:
    values = torch.logspace(-4, 0, 256)[None] * 3e-5
    codes, scales = quantise(values, table(signed, CPU))
    error = (dequantise(codes, scales, table(signed, CPU)) - values).abs() / values
    assert within(error[values > 0.1 * 3e-5].max(), 0.06)
    assert within(error.max(), 0.35)
    assert scales == pytest.approx(3e-5)


def test_signs_are_kept() -> None:
    values = torch.linspace(-1, 1, 101)[None]
    codes, scales = quantise(values, table(True, CPU))
    found = dequantise(codes, scales, table(True, CPU))
    torch.testing.assert_close(found, values, atol=0.015, rtol=0)


def test_each_value_takes_its_nearest_level() -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(values, table(True, CPU))
    levels = table(True, CPU)[0]
    nearest = ((values / scales[:, None])[..., None] - levels).abs().argmin(-1)
    assert torch.equal(codes.long(), nearest)


@pytest.mark.parametrize("signed", [True, False])
def test_the_level_of_a_value_is_the_one_that_a_search_among_all_borders_finds(signed: bool) -> None:
    _, borders, _ = table(signed, CPU)
    on = borders[:-1]
    beside = [torch.nextafter(on, torch.full_like(on, end)) for end in (-torch.inf, torch.inf)]
    zeros = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.nan])
    values = torch.cat([on, *beside, zeros, torch.linspace(-1, 1, 4001), torch.logspace(-12, 0, 4001)])
    alone = torch.stack([values, torch.ones_like(values)], dim=1)  # 1 beside each: the scale
    assert torch.equal(quantise(alone, table(signed, CPU))[0][:, 0].int(), torch.bucketize(values, on, out_int32=True))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((3072, 3072), 256),
        ((64, 64), 64),
        ((128, 36), 36),
        ((16, 1000), 250),
        ((9216,), None),
        ((32, 32), None),
        ((64, 257), None),
        ((512, 16), None),
        ((32, 4, 2, 8, 8), 256),
    ],
)
def test_a_block_is_a_part_of_a_row(shape: tuple[int, ...], block: int | None) -> None:
    assert block_size(shape) == block
    if block is not None:
        rows, blocks = scale_shape(shape, block)
        assert rows == shape[0]
        assert blocks * block * rows == torch.Size(shape).numel()
