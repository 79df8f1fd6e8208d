"""The families of the tests, made known, and config files of tiny runs of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from longtake.data.clips.video import write_video
from longtake.data.probing.probe import probe_table
from longtake.families import registry
from longtake.families.registry import register
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.system.build import System, build_system
from longtake.train.run_file import read_run
from tests.data.made_clips import noise_frames
from tests.families.everything import EVERYTHING
from tests.families.plain import PLAIN
from tests.train.runs import write_config

SEGMENT = 8  # frames
SIZES: dict[str, dict[str, Any]] = {
    "everything": {
        "model": {"type": "everything"},
        "ae": {"type": "chunks"},
        "objective": {"type": "flow_everything"},
        "dropout_ratio": {"t5": 0.2},
        "condition_config": {"none": 1.0, "box": 1.0, "first": 1.0, "edit": 1.0, "inpaint": 1.0},
        "bucket_config": {"32px": {1: (1.0, 4), 8: (1.0, 3), 17: (1.0, 2)}},
        "warmup_steps": None,
        "optim": {
            "schedule": [(0, 1e-4, "cosine"), (2, 1e-2, "cosine"), (4, 1e-3)],  # one cycle
            "weight_decay": 0.1,
            "groups": [
                {"match": ["null_text"], "name": "null", "lr": 2e-3},
                {"match": ["*.bias"], "name": "biases", "weight_decay": 0.0},
                {"match": ["layers.*"], "name": "blocks", "schedule": [(0, 4e-3), (4, 0.0)], "weight_decay": 0.01},
                {"match": ["x_*"], "name": "ends", "lr": 1e-3},
            ],
        },
    },
    "plain": {
        "model": {"type": "plain", "channels": 1536},
        "objective": {"type": "v"},
        "dropout_ratio": {"t5": 0.2},
    },
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    known = dict(registry._FAMILIES)
    register(PLAIN)
    register(EVERYTHING)
    yield
    registry._FAMILIES.clear()
    registry._FAMILIES.update(known)


def write_family(folder: Path, clips: Path, name: str, **changes: Any) -> Path:
    """The config file of a tiny run of a family, with some keys changed."""
    path = write_config(folder, with_everything(clips, folder) if name == "everything" else clips)
    text = path.read_text().replace("model = dict(", "_unused = dict(")
    path.write_text(text + "".join(f"{key} = {value!r}\n" for key, value in (SIZES[name] | changes).items()))
    return path


@pytest.fixture
def everything(clips: Path, tmp_path: Path) -> Iterator[System]:
    config = read_run(str(write_family(tmp_path, clips, "everything"))).value
    with start_world("cpu") as world:
        system = build_system(config, Mesh.create(config.parallel, world), world)
        with torch.no_grad():
            system.denoiser.null_text.fill_(1.5)
        yield system


def with_everything(clips: Path, folder: Path) -> Path:
    """The table with a caption for either half of each clip, and the clip itself as its control video."""
    table = pq.read_table(clips)
    texts = [
        json.dumps([text] if frames == 1 else [text, f"then {text}"])
        for text, frames in zip(table["text"].to_pylist(), table["num_frames"].to_pylist(), strict=True)
    ]
    paths = [str(clips.parent / path) for path in table["path"].to_pylist()]
    for name, column in {"text": texts, "path": paths}.items():
        table = table.set_column(table.column_names.index(name), name, [column])
    pq.write_table(table.append_column("control", [paths]), folder / "everything.parquet")
    return folder / "everything.parquet"


def write_scenes(folder: Path, *lengths: int, side: int = 32) -> Path:
    """The table of four clips of each length, with a caption for each of their segments."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, texts = [], []
    for number, frames in enumerate(lengths * 4):
        write_video(folder / f"{number}.mp4", noise_frames(frames, side, side, seed=number), 16)
        paths.append(f"{number}.mp4")
        texts.append(json.dumps([f"scene {number} part {part}" for part in range((frames - 1) // SEGMENT)]))
    pq.write_table(pa.table({"path": paths, "text": texts}), folder / "list.parquet")
    probe_table(folder / "list.parquet", folder / "clips.parquet")
    return folder / "clips.parquet"
