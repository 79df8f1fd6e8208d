from __future__ import annotations

from typing import Any

import pytest

from longtake.buckets.assignment import BucketRule
from longtake.buckets.entries import bucket_config_faults
from longtake.contracts import UserError

PAIRS = "(keep probability, batch size)"


@pytest.mark.parametrize(
    ("config", "place", "fix"),
    [
        ({}, "bucket_config = {}", "at least one resolution"),
        (5, "bucket_config = 5", "at least one resolution"),
        ({"256": {1: (1.0, 2)}}, "bucket_config.256", "256px"),
        ({256: {1: (1.0, 2)}}, "bucket_config.256", "256px"),
        ({"256px": {}}, "bucket_config.256px = {}", "at least one length"),
        ({"256px": (1.0, 2)}, "bucket_config.256px = (1.0, 2)", "at least one length"),
        ({"256px": {0: (1.0, 2)}}, "bucket_config.256px.0", "whole number of frames"),
        ({"256px": {1.5: (1.0, 2)}}, "bucket_config.256px.1.5", "whole number of frames"),
        ({"256px": {"many": (1.0, 2)}}, "bucket_config.256px.many", "whole number of frames"),
        ({"256px": {33: (1.0, 2), "33": (1.0, 2)}}, "bucket_config.256px.33", "given twice"),
        ({"256px": {33: 5}}, "bucket_config.256px.33 = 5", PAIRS),
        ({"256px": {33: (1.0, 2, 3)}}, "bucket_config.256px.33 = (1.0, 2, 3)", PAIRS),
        ({"256px": {33: (1.5, 2)}}, "bucket_config.256px.33 = (1.5, 2)", "keep probability must lie in 0..1"),
        ({"256px": {33: ("a", 2)}}, "bucket_config.256px.33 = ('a', 2)", "keep probability must lie in 0..1"),
        ({"256px": {33: (float("nan"), 2)}}, "bucket_config.256px.33", "keep probability must lie in 0..1"),
        ({"256px": {33: ((0.5, -1), 2)}}, "bucket_config.256px.33", "skip probability must lie in 0..1"),
        ({"256px": {1: ((0.5, 0.5), 2)}}, "bucket_config.256px.1", "a still has no shorter length"),
        ({"256px": {33: (1.0, 0)}}, "bucket_config.256px.33 = (1.0, 0)", "batch size"),
        ({"256px": {33: (1.0, 2.5)}}, "bucket_config.256px.33", "batch size"),
        ({"256px": {33: (1.0, True)}}, "bucket_config.256px.33", "batch size"),
        ({"256px": {1: (0.0, 2), 33: ((1.0, 1.0), 2)}}, "bucket_config", "no clip would train"),
        ({"8px": {1: (1.0, 2)}}, "bucket_config.8px", "thinner than the size divisor 16"),
    ],
)
def test_a_malformed_bucket_config_is_answered_with_place_value_and_fix(config: Any, place: str, fix: str) -> None:
    (fault,) = bucket_config_faults(config, divisor=16)
    assert fault.startswith(place)
    assert fix in fault
    with pytest.raises(UserError) as caught:
        BucketRule.from_config(config, 16)
    assert str(caught.value) == fault


def test_all_faults_are_found_at_once_and_carry_their_place() -> None:
    config = {"256px": {1: (2, 3), 33: (1.0, 0)}, "x": {1: (1.0, 1)}}
    faults = bucket_config_faults(config)
    assert len(faults) == 3
    assert all(fault.startswith("bucket_config.") for fault in faults)
    with pytest.raises(UserError, match=r"\(and 2 more\)"):
        BucketRule.from_config(config, 16)


def test_a_good_bucket_config_has_no_faults() -> None:
    config = {"256px": {1: (1, 45), 5: [1.0, 12], "33": ((0.5, 0.2), 2)}, "720p_ar16:9": {129: (0.0, 1)}}
    assert bucket_config_faults(config, divisor=16) == []
