"""Launches, copies and conversions of an encode equal the committed ones: a layout conversion in a layer is noticed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.encode_profile import PLANTED, ROOT, _converts_inside, _order, counted
from tests.pretended.library import CannotBuild

COMMITTED = ROOT / "benchmarks" / "results" / "encode_profile.json"


@pytest.mark.slow
def test_encode_counts_equal_the_committed_ones_and_a_planted_conversion_is_counted() -> None:
    committed = json.loads(COMMITTED.read_text())
    made_by = committed["machine"]["torch"]
    if made_by.split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip(f"counts are of PyTorch {made_by}")
    try:
        counts = counted()
    except CannotBuild as error:
        pytest.skip(str(error))
    planted, plain = counts.pop(PLANTED)["contiguous"], counts["hunyuan_vae"]["contiguous"]
    assert counts == committed["figures"]["counts"]
    assert planted["layout_conversions"] >= plain["layout_conversions"] + plain["convolutions"] - 2


@pytest.mark.parametrize(
    ("input_last", "weight_last", "converts"),
    [(False, False, False), (True, True, False), (True, False, False), (False, True, True)],
)
def test_convolution_converts_where_its_input_lacks_the_layout(
    input_last: bool, weight_last: bool, converts: bool
) -> None:
    form = torch.channels_last_3d
    x, weight = torch.zeros(1, 4, 3, 5, 6), torch.zeros(8, 4, 3, 3, 3)
    x = x.contiguous(memory_format=form) if input_last else x
    weight = weight.contiguous(memory_format=form) if weight_last else weight
    assert _converts_inside(x, weight) is converts


def test_order_of_dims_ignores_those_of_one_element() -> None:
    x = torch.zeros(1, 4, 3, 5)
    assert _order(x) == (1, 2, 3)
    assert _order(x.contiguous(memory_format=torch.channels_last)) == (2, 3, 1)
    assert _order(x.transpose(0, 1)) == (0, 2, 3)
