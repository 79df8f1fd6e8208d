from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.transforms import spread_window, window

GOLDEN = Path(__file__).parents[2] / "golden" / "opensora_v2"
CROPS = json.loads((GOLDEN / "temporal_crop.json").read_text())


@pytest.mark.parametrize("case", CROPS["draws"], ids=lambda case: str(case["python_seed"]))
def test_the_spread_law_takes_the_frames_of_the_reference_from_its_draw(case: dict) -> None:
    total, count, interval = case["total_frames"], case["num_frames"], case["frame_interval"]
    random.seed(case["python_seed"])
    start = random.randint(0, max(0, total - count * interval - 1))
    assert spread_window(total, count, interval, start).tolist() == case["indices"]


@pytest.mark.parametrize("case", CROPS["reachable"], ids=lambda case: str(case["total_frames"]))
def test_the_spread_law_reaches_the_windows_of_the_reference_and_no_other(case: dict) -> None:
    arguments = case["total_frames"], case["num_frames"], case["frame_interval"]
    reached = {tuple(window(*arguments, u, "spread").tolist()) for u in np.linspace(0, 0.9999, 1000)}
    assert reached == {tuple(result) for result in case["every_result"]}


@pytest.mark.parametrize(("total", "count", "interval"), [(12, 4, 2), (33, 33, 1), (7, 1, 1), (200, 33, 3), (9, 4, 2)])
def test_the_stride_is_exact_and_every_window_that_fits_is_equally_likely(
    total: int, count: int, interval: int
) -> None:
    num_windows = total - (count - 1) * interval
    draws = (np.arange(num_windows * 50) + 0.5) / (num_windows * 50)
    starts: Counter[int] = Counter()
    for u in draws:
        frames = window(total, count, interval, u)
        assert frames.dtype == np.int64
        assert len(frames) == count
        assert (np.diff(frames) == interval).all()
        assert frames[0] >= 0
        assert frames[-1] < total
        starts[int(frames[0])] += 1
    assert starts == dict.fromkeys(range(num_windows), 50)


def test_the_largest_draw_stays_inside_the_clip() -> None:
    assert window(100, 10, 1, np.float32(1 - 2**-24))[-1] == 99


def test_a_window_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="33 frames at a stride of 2 do not fit into a clip of 64 frames"):
        window(64, 33, 2, 0.0)
