"""Make twelve clips of 33 frames and four images of 256 x 256, and their Parquet tables: `clips.py FOLDER`."""

import sys
from pathlib import Path

import numpy as np
from pyarrow import parquet, table

from longtake.data.clips.video import write_image, write_video
from longtake.data.probing.probe import probe_table

folder = Path(sys.argv[1])
generator, names = np.random.default_rng(0), [f"{i}.{'mp4' if i < 12 else 'png'}" for i in range(16)]
for name in names:
    frames = np.linspace(*generator.integers(0, 256, (2, 16, 16, 3)), 33).repeat(16, 1).repeat(16, 2).astype(np.uint8)
    write_video(folder / name, frames, 16) if name.endswith("mp4") else write_image(folder / name, frames[0])
for name, caption in (("clips", "a fade &amp; its light"), ("stories", '["a fade", "a fade"]')):  # one per segment
    parquet.write_table(table({"path": names, "text": [caption] * len(names)}), folder / "unprobed.parquet")
    probe_table(folder / "unprobed.parquet", folder / f"{name}.parquet")
