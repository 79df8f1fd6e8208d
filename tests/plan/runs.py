"""Small runs to be planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtake.train.config import RunConfig

TABLE = "path,text,num_frames,height,width,fps\n"


def run_config(**changes: Any) -> RunConfig:
    """A run of a small model on two lengths of clips; `changes` replace keys, `model` and `parallel` only in part."""
    tree: dict[str, Any] = {
        "dataset": {"data_path": "nowhere.csv"},
        "bucket_config": {"64px": {8: (1.0, 4), 16: (1.0, 2)}},
        "model": {"in_channels": 1536, "patch_size": 1, "hidden_size": 256, "num_heads": 4, "axes_dim": (16, 24, 24)},
        "ae": {"type": "pixel", "temporal": 8, "spatial": 8},
        "t5": {"type": "words", "dim": 128, "max_length": 16},
        "clip": {"type": "words", "dim": 128},
        "parallel": {},
        "max_steps": 100,
    }
    tree["model"] |= {"depth": 2, "depth_single_blocks": 4, "context_in_dim": 128, "vec_in_dim": 128}
    for key, value in changes.items():
        tree[key] = tree[key] | value if key in ("model", "parallel", "dataset") else value
    return RunConfig(**tree)


def write_table(folder: Path, clips: list[tuple[int, int, int]]) -> Path:
    """A clip table of (frames, height, width) at 8 frames a second; the files themselves are not there."""
    lines = [f"{i}.mp4,a clip,{frames},{height},{width},8\n" for i, (frames, height, width) in enumerate(clips)]
    path = folder / "clips.csv"
    path.write_text(TABLE + "".join(lines), encoding="utf-8")
    return path
