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
    x = np.linspace(0, 255, 256)[None, None, :, None] * generator.random((1, 1, 1, 3))
    frames = ((x + np.linspace(0, 60, 33)[:, None, None, None]) % 256).repeat(256, axis=1).astype(np.uint8)
    write_video(folder / name, frames, 16) if name.endswith("mp4") else write_image(folder / name, frames[0])
for name, caption in (("clips", "a ramp &amp; its light"), ("stories", '["a ramp", "a ramp"]')):  # one per segment
    parquet.write_table(table({"path": names, "text": [caption] * len(names)}), folder / "unprobed.parquet")
    probe_table(folder / "unprobed.parquet", folder / f"{name}.parquet")
