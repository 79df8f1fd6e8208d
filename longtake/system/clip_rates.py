"""Videos of different frame rates whose samples differ in speed, for a model without the rate as a condition."""

from __future__ import annotations

import numpy as np

from longtake.buckets.protocol import BucketLaw, keyed_draw
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.system.config import SystemConfig

_MOST_SPREAD = 1.25  # of the samples' highest rate to their lowest
_MOST_ROWS = 100_000  # that are looked at, evenly spread


def clip_rate_lines(config: SystemConfig, law: BucketLaw, table: ClipTable | MixedTable) -> list[str]:
    """For the report before the first step: a warning where clips become samples of different rates under a bucket
    law, and captions do not give the rate."""
    if config.sample_rules.caption != "plain":
        return []
    rows = np.unique(np.linspace(0, len(table) - 1, min(len(table), _MOST_ROWS)).astype(np.int64))
    columns = [np.asarray(getattr(table, name)[rows], np.float64) for name in ("num_frames", "height", "width", "fps")]
    is_timed = (columns[0] > 1) & np.isfinite(columns[3]) & (columns[3] > 0)
    columns = [column[is_timed] for column in columns]
    rates = law.timing(tuple(columns), keyed_draw(0, 0, 0, table.clip_ids[rows][is_timed])).rate
    if not len(rates) or rates.max() <= _MOST_SPREAD * rates.min():
        return []
    given, sizes = columns[3], getattr(config, "sizes", None)
    if sizes is not None and sizes.video_sample_fps is None:
        remedy = f"sizes.video_sample_fps = {np.median(rates):.3g} takes frames at one rate"
    else:
        remedy = f"convert the clips to one rate, such as ffmpeg -i IN -r {np.median(given):.3g} OUT"
    return [
        f"warning: videos of {given.min():g} to {given.max():g} fps become samples of {rates.min():.3g} to "
        f"{rates.max():.3g} frames a second, and the model has no rate as a condition, so speeds are mixed; {remedy}"
    ]
