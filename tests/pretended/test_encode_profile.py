"""Launches, copies and conversions of an encode equal the committed ones: a layout conversion in a layer is noticed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.encode_profile import PLANTED, ROOT, counted
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
