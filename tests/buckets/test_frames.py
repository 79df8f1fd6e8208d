from __future__ import annotations

import numpy as np
import pytest

from longtake.buckets.assignment import frame_interval
from tests.buckets.tables import column, golden


@pytest.mark.parametrize("case", golden("target_fps.json")["cases"], ids=lambda case: str(case["max_fps"]))
def test_the_frame_rate_rule_equals_the_reference(case: dict) -> None:
    new_fps, interval = frame_interval(column(case["rows"], 0), case["max_fps"])
    np.testing.assert_array_equal(new_fps, column(case["rows"], 1))
    np.testing.assert_array_equal(interval, column(case["rows"], 2))


def test_an_unknown_rate_is_read_frame_by_frame() -> None:
    new_fps, interval = frame_interval([np.nan, 0.0, -5.0, np.inf], 24)
    assert new_fps.tolist() == [0, 0, 0, 0]
    assert interval.tolist() == [1, 1, 1, 1]


def test_without_a_ceiling_every_rate_is_kept() -> None:
    new_fps, interval = frame_interval([12.0, 240.0, np.nan], None)
    assert new_fps.tolist() == [12, 240, 0]
    assert interval.tolist() == [1, 1, 1]


def test_no_clip_ends_up_above_the_ceiling() -> None:
    rates = np.linspace(0.5, 480, 5000)
    for ceiling in (8, 23.976, 24, 30):
        new_fps, interval = frame_interval(rates, ceiling)
        assert (new_fps <= ceiling).all()
        assert (new_fps <= rates / interval).all()
