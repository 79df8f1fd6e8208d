"""A sample from a latent store beside the same sample decoded and encoded: milliseconds of one process.

    python benchmarks/encode.py [--tiny] [--json FILE]

Made clips (H.264) are encoded in one view with the pixel autoencoder, which keeps every number of the pixels as a
float32: its latents are as many bytes as latents can be, and encoding costs next to nothing. Ways are timed in turns;
the best turn of each counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import print_table, write_json

from longtake.buckets.assignment import BucketRule
from longtake.contracts import Slot
from longtake.data.clips.video import write_video
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.store import LatentStore
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.draws import draw
from longtake.data.probing.probe import probe_table
from longtake.data.tables.mix import open_clips
from longtake.diffusion.flow import RectifiedFlow
from longtake.encode.plan import encode_inputs, make_plan
from longtake.encode.run import EncodeOptions, encode
from longtake.parallel.world import World
from longtake.system.encoders import build_encoders
from longtake.system.examples import wanted_draws
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run

CONFIG = """
dtype = "fp32"
device = "cpu"
dataset = dict(data_path={table!r}, views=1)
bucket_config = {{{resolution!r}: {{16: (1.0, 1)}}}}
ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=64, max_length=64)
clip = dict(type="words", dim=64, max_length=64)
model = dict(in_channels=1536, patch_size=1, hidden_size=36, num_heads=2, axes_dim=(6, 6, 6), depth=1,
             depth_single_blocks=1, vec_in_dim=64, context_in_dim=64)
"""


def make_clips(folder: Path, count: int, frames: int, height: int, width: int) -> Path:
    """Clips in which coarse noise drifts over a slope, and their probed table."""
    noise = np.random.default_rng(0).integers(0, 255, (count, height // 8, width // 8, 3), dtype=np.uint8)
    lines = ["path,text"]
    for number in range(count):
        ground = noise[number].repeat(8, axis=0).repeat(8, axis=1)
        pixels = np.stack([np.roll(ground, 3 * t, axis=1) for t in range(frames)])
        write_video(folder / f"{number}.mp4", pixels, 24)
        lines.append(f"{number}.mp4,clip {number} of a drifting pattern")
    (folder / "clips.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    probe_table(folder / "clips.csv", folder / "clips.parquet")
    return folder / "clips.parquet"


def per_sample(ways: dict[str, Callable[[Slot], object]], slots: list[Slot], turns: int) -> dict[str, float]:
    """Milliseconds a slot of each way, the best of some turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            started = time.perf_counter()
            for slot in slots:
                way(slot)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started) / len(slots))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few small clips, for tests")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    count, frames, height, width, resolution, turns = (
        (4, 24, 96, 160, "64px", 1) if given.tiny else (6, 120, 720, 1280, "256px", 5)
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        table_path = make_clips(folder, count, frames, height, width)
        (folder / "run.py").write_text(CONFIG.format(table=str(table_path), resolution=resolution), encoding="utf-8")
        run: RunConfig = read_run(str(folder / "run.py")).value
        store_path = folder / "store"
        started = time.perf_counter()
        world = World(0, 1, 0, torch.device("cpu"))
        result = encode(run, run.dataset, run.bucket_rule, 0, EncodeOptions(store_path), world)
        encoding = 1e3 * (time.perf_counter() - started) / result.num_entries

        store, encoders = LatentStore.open(store_path), build_encoders(run, world.device)
        settings = {"seed": run.seed, "stage": 0, "latent": store.encoders.latent}
        rule = BucketRule.from_config(run.bucket_config, run.size_divisor, run.dataset.fps_max)
        pixels = SlotDataset(open_clips(run.dataset), run.dataset, **settings)
        stored = StoredDataset(store, pixels.table, run.dataset, **settings)
        plan = make_plan(encode_inputs(run.seed, run.dataset, rule, pixels.table, 0), pixels.texts)
        slots = [slot for i in range(len(plan)) for slot in plan.slots(rule, i, i + 1)]

        wanted = wanted_draws(run, RectifiedFlow(run.objective, 1).draws, store.encoders.posterior)

        def draws(slot: Slot) -> object:
            return draw(slot, run.seed, 0, settings["latent"], wanted, 1)

        def decoded_and_encoded(slot: Slot) -> None:
            batch = pixels[slot]
            encoders.posterior(batch.video)
            encoders.embed(batch.text)

        def from_store(slot: Slot) -> None:
            (entry,) = store.find(0, slot.samples).tolist()
            store.latents(entry)
            store.texts(entry, *stored.texts(slot))

        ways = {
            "decode, scale, encode": decoded_and_encoded,
            "read from the store": from_store,
            "draws for the trainer, in both cases": draws,
            "a whole batch from the store": lambda slot: stored[slot],
        }
        found = per_sample(ways, slots, turns)
        size = sum(path.stat().st_size for path in store_path.glob("latents/*.safetensors")) / len(store)
    found["`data encode`, all in all"] = encoding
    first = found["decode, scale, encode"]
    rows = [(name, f"{ms:.2f}", f"{first / ms:.1f}x" if "read" in name else "") for name, ms in found.items()]
    print_table((f"{count} clips of {frames} frames {height}x{width}", "ms a sample", "as fast as decoding"), rows)
    figures = {"clips": count, "frames": frames, "height": height, "width": width, "resolution": resolution}
    write_json(given.json, "encode", figures | {"bytes_per_sample": size, "milliseconds": found})


if __name__ == "__main__":
    main()
