"""Stores made in this process for the tests, and what must be equal between two of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longtake.data.latents.store import LatentStore
from longtake.data.tables.mix import open_clips
from longtake.encode.run import EncodeOptions, EncodeResult, encode
from longtake.parallel.world import World
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run

ALONE = World(0, 1, 0, torch.device("cpu"))


def make_store(
    config: Path,
    folder: Path,
    *overrides: str,
    views: int = 2,
    progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = 100_000,
    **options: Any,
) -> EncodeResult:
    """Encodes the run of a config file, in shards of a few samples."""
    run: RunConfig = read_run(str(config), ["--dataset.views", str(views), *overrides]).value
    chosen = EncodeOptions(folder, shard_bytes=shard_bytes, **options)
    return encode(run, run.dataset, run.bucket_rule, 0, chosen, ALONE, progress, run.condition_config)


def open_table(config: Path) -> Any:
    """The clip table of a config file."""
    return open_clips(read_run(str(config)).value.dataset)


def contents(folder: Path) -> dict[str, bytes]:
    """Every shard by name, and the index but for when files were changed: what must repeat byte for byte."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    store = LatentStore.open(folder)
    names = ("view", "sample", "bucket", "num_frames", "text", "shard", "place", "crc")
    return found | {f"index/{name}": store.column(name).tobytes() for name in names}
