"""A trained run in a second or two: two steps of a very small model on a few made-up clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.train.run import Outcome, train_run

CONFIG = """
exp_name = "run"
seed = 5
dtype = "fp32"
device = "cpu"
dataset = dict(data_path={table!r}, fps_max=24)
bucket_config = {{"32px": {{1: (1.0, 4), 8: (1.0, 4)}}}}
ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=32, max_length=8)
clip = dict(type="words", dim=32, max_length=8)
model = dict(
    type="flux", in_channels=1536, patch_size=1, hidden_size=32, num_heads=2, axes_dim=(4, 6, 6),
    depth=1, depth_single_blocks=1, vec_in_dim=32, context_in_dim=32, fused_qkv=True,
)
objective = dict(predict="clean", min_t=0.05)
lr = 1e-2
ema_decay = 0.5
max_steps = 3
num_workers = 0
tensorboard = False
outputs = {outputs!r}
fps_save = 8
sampling_option = dict(resolution="32px", aspect_ratio="1:1", num_frames=8, num_steps=3, guidance=3.0, seed=7)
"""


def write_config(folder: Path) -> Path:
    """Makes clips, their table and a config file in `folder`; returns the config file."""
    clips = make_shapes(folder / "clips", num_clips=16, num_stills=4)
    table = folder / "clips" / "clips.parquet"
    probe_table(clips, table)
    config = folder / "tiny.py"
    config.write_text(CONFIG.format(table=str(table), outputs=str(folder / "outputs")))
    return config


def make_run(folder: Path) -> Outcome:
    """Trains the run `outputs/run` in `folder`."""
    return train_run(str(write_config(folder)), [], Console(quiet=True))


def keep_written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, np.ndarray]:
    """The frames that generations hand to the encoder of videos from now on, by path; no file is written."""
    written: dict[Path, np.ndarray] = {}

    @contextmanager
    def writer(path: Path, size: tuple[int, ...], fps: float) -> Iterator[Callable[[np.ndarray], None]]:
        parts: list[np.ndarray] = []
        yield parts.append
        written[path] = np.concatenate(parts)

    monkeypatch.setattr("longtake.generate.run.video_writer", writer)
    return written
