"""Videos of different frame rates that are read at one stride, and so at different speeds."""

from __future__ import annotations

import numpy as np

from longtake.data import ClipTable, MixedTable
from longtake.system.config import SystemConfig

_MOST_SPREAD = 1.25  # of the fastest video's rate to the slowest one's


def clip_rate_lines(config: SystemConfig, table: ClipTable | MixedTable) -> list[str]:
    """For the report before the first step: a warning where `sizes.video_sample_stride` mixes speeds."""
    sizes = getattr(config, "sizes", None)
    if sizes is None or sizes.video_sample_fps is not None:
        return []
    rates = np.asarray(table.fps, np.float64)[np.asarray(table.num_frames) > 1]
    rates = rates[np.isfinite(rates) & (rates > 0)]
    if not len(rates) or rates.max() <= _MOST_SPREAD * rates.min():
        return []
    stride, slowest, fastest = sizes.video_sample_stride, rates.min(), rates.max()
    return [
        f"warning: sizes.video_sample_stride = {stride} takes frames of videos of {slowest:g} to {fastest:g} fps, "
        f"so samples have {slowest / stride:.3g} to {fastest / stride:.3g} frames a second and speeds are mixed; "
        f"sizes.video_sample_fps = {np.median(rates) / stride:.3g} takes frames at one rate"
    ]
