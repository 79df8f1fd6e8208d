"""Videos that become samples of different rates are named before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from longtake.presets import find_preset
from longtake.system.clip_rates import clip_rate_lines
from longtake.train.run_file import read_run

FUN, TTT = "cogvideox_fun/lora_2b", "ttt_video/ttt_mlp/3s"
CASES: list[tuple[str, tuple[str, ...], list[float], str]] = [
    (FUN, (), [12, 60, 24], "sizes.video_sample_fps = 8 "),
    (FUN, ("--sizes.video-sample-fps", "6"), [12, 60, 24], ""),
    (FUN, (), [23.976, 24, 25], ""),
    (FUN, (), [float("nan"), 0, 24], ""),
    (TTT, (), [12, 60, 16], "ffmpeg -i IN -r 16 OUT"),
    ("opensora_v2/stage1", (), [12, 60, 24], ""),  # captions give the rate
    ("opensora_v1_2/stage1", (), [12, 60, 24], ""),  # so does a condition
]


@pytest.mark.parametrize(("preset", "flags", "rates", "remedy"), CASES)
def test_samples_of_different_rates_warn_with_a_remedy_where_the_model_is_not_told(
    preset: str, flags: tuple[str, ...], rates: list[float], remedy: str
) -> None:
    config = read_run(str(find_preset(preset)), ["--dataset.data-path", "clips.parquet", *flags]).value
    fps = np.array([*rates, 90.0])
    frames, ones = np.array([490] * len(rates) + [1]), np.full(len(fps), 256)
    ids = np.arange(len(fps), dtype=np.uint64)
    parts = {"num_frames": frames, "height": ones, "width": ones, "fps": fps, "clip_ids": ids}

    class Table(SimpleNamespace):
        def __len__(self) -> int:
            return len(fps)

    lines = clip_rate_lines(config, config.bucket_rule, Table(**parts))
    assert len(lines) == bool(remedy)
    if remedy:
        assert remedy in lines[0]
        assert "of 12 to 60 fps" in lines[0]
