"""Golden files and small made-up clip tables for the bucket tests."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from longtake.buckets.assignment import BucketRule
from longtake.buckets.inputs import OrderInputs

_GOLDEN = Path(__file__).parents[1] / "golden"

CONFIG = {"32px": {1: (1.0, 3), 5: (1.0, 2), 9: ((0.7, 0.3), 2)}, "64px": {1: (0.5, 2), 5: (0.6, 1)}}


def golden(name: str, system: str = "opensora_v2") -> Any:
    """A golden JSON file, as it is or compressed; the frame rates that are NaN are null in it."""
    data = (_GOLDEN / system / name).read_bytes()
    return json.loads(lzma.decompress(data) if name.endswith(".xz") else data)


def column(rows: list[list[Any]], index: int) -> np.ndarray:
    """One column of a JSON table as float64, null as NaN."""
    return np.array([np.nan if row[index] is None else row[index] for row in rows], np.float64)


def rule(config: dict = CONFIG, divisor: int = 8, **options: Any) -> BucketRule:
    return BucketRule.from_config(config, divisor, **options)


def clip_columns(num_clips: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Stills and short videos of many sizes; a few of them too small, too short or with missing numbers."""
    rng = np.random.default_rng(seed)
    num_frames = np.where(rng.random(num_clips) < 0.3, 1, rng.integers(2, 24, num_clips)).astype(np.float64)
    num_frames[rng.random(num_clips) < 0.02] = np.nan
    return {
        "num_frames": num_frames,
        "height": rng.integers(16, 120, num_clips),
        "width": rng.integers(16, 120, num_clips),
        "fps": rng.choice([12.0, 24.0, 30.0, np.nan], num_clips),
        "clip_ids": rng.integers(0, 1 << 63, num_clips, dtype=np.uint64),
    }


def inputs(num_clips: int = 200, table_seed: int = 0, **changes: Any) -> OrderInputs:
    """Order inputs over `clip_columns`, with anything replaced."""
    columns = clip_columns(num_clips, table_seed)
    options = {"seed": 7, "stage": 0, "slots_per_step": 4, "rule": rule(), "table": f"{num_clips}/{table_seed}"}
    return OrderInputs(**{**options, **columns, "window_steps": 3, **changes})
