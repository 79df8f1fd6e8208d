"""Videos of different rates read at one stride are named before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from longtake.system.clip_rates import clip_rate_lines


@pytest.mark.parametrize(
    ("rates", "sample_fps", "is_warned"),
    [
        ([12, 60, 24], None, True),
        ([12, 60, 24], 8, False),
        ([23.976, 24, 25], None, False),
        ([float("nan"), 0, 24], None, False),
    ],
)
def test_stride_on_different_rates_warns_with_the_key_of_a_rate(
    rates: list[float], sample_fps: float | None, is_warned: bool
) -> None:
    config = SimpleNamespace(sizes=SimpleNamespace(video_sample_stride=4, video_sample_fps=sample_fps))
    table = SimpleNamespace(fps=np.array([*rates, 90.0]), num_frames=np.array([49] * len(rates) + [1]))
    lines = clip_rate_lines(config, table)
    assert bool(lines) == is_warned
    if is_warned:
        assert "sizes.video_sample_fps = 6 " in lines[0]
        assert "3 to 15 frames a second" in lines[0]


def test_families_without_a_stride_of_their_sizes_get_no_line() -> None:
    assert clip_rate_lines(SimpleNamespace(), SimpleNamespace()) == []
