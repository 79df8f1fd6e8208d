"""A model that is good at a few made-up clips, for faults to be planted in what it is given."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from rich.console import Console

from longtake.data.clips.video import write_video
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import FPS, draw_clip, split_prompts
from longtake.presets import find_preset
from longtake.random import Purpose, uniforms
from longtake.train.run import train_run

COLOURS = "red", "yellow", "green"  # no blue: clips whose colours are swapped look unlike all others

CONFIG = """
_base_ = "{base}"
exp_name = "good"
seed = 3
device = "cpu"
dtype = "fp32"
dataset = dict(data_path={table!r}, cache_mb=64)
outputs = {outputs!r}
bucket_config = {{"_delete_": True, "32px": {{8: (1.0, 16)}}}}
ae = dict(_delete_=True, type="pixel", temporal=8, spatial=8)
model = dict(in_channels=1536, hidden_size=64, num_heads=2, depth_single_blocks=2)
optim = dict(lr=3e-3)
warmup_steps = 10
ema_decay = 0.98
max_steps = 250
ckpt_every = 0
num_workers = 0
tensorboard = False
"""


def make_clips(folder: Path, count: int = 160) -> Path:
    """Shapes that fade in, so that clips played backwards look unlike all others; returns their probed table."""
    folder.mkdir(parents=True)
    texts = [text for text in split_prompts()[0] if text.split()[1] in COLOURS]
    draws = uniforms(1, 0, Purpose.SAMPLING, 0, np.arange(count), 9)
    with (folder / "clips.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "text"))
        for number in range(count):
            text = texts[number * 7 % len(texts)]
            frames = draw_clip(text, draws[number], 0.0, 0.0)
            shown = np.linspace(0.2, 1, len(frames))[:, None, None, None]
            faded = 128 + (frames.astype(np.float64) - 128) * shown
            write_video(folder / f"{number:03d}.mp4", faded.round().clip(0, 255).astype(np.uint8), FPS, crf=10)
            rows.writerow((f"{number:03d}.mp4", text))
    probe_table(folder / "clips.csv", folder / "clips.parquet")
    return folder / "clips.parquet"


def write_config(folder: Path, table: Path, **changes: object) -> Path:
    """`folder/good.py`; `changes` are appended as assignments."""
    path = folder / "good.py"
    text = CONFIG.format(base=str(find_preset("demo/shapes")), table=str(table), outputs=str(folder / "outputs"))
    path.write_text(text + "".join(f"{name} = {value!r}\n" for name, value in changes.items()), encoding="utf-8")
    return path


def make_good(folder: Path) -> Path:
    """The folder of the run, trained."""
    config = write_config(folder, make_clips(folder / "clips"))
    return train_run(str(config), [], Console(quiet=True)).folder
