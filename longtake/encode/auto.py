"""`dataset.latents = "auto"`: what a store of a run's latents would take, and whether the run makes one first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from longtake.buckets.protocol import BucketLaw
from longtake.data.config import DatasetConfig
from longtake.data.latents.store import INDEX_NAMES, STORE_FILE, read_facts
from longtake.data.tables.mix import MixedTable, open_clips
from longtake.data.tables.table import ClipTable
from longtake.encode.fit import OtherStore
from longtake.encode.plan import encode_inputs, view_samples
from longtake.encode.run import EncodeOptions, encode
from longtake.encoders.cost import autoencoder_cost
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.system.encoders import captions_of_sample, companions_costs, encoding_costs
from longtake.system.examples import windows_of

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_ENCODING_FLOPS = 300e12  # a second, of convolutions on an H200: taken, not measured


@dataclass(frozen=True)
class StoreSize:
    """What all views of all samples take, those that cannot be read included."""

    samples: int
    views: int
    latent_bytes: float
    text_bytes: float
    flops: float

    def __str__(self) -> str:
        hours, parts = self.flops / _ENCODING_FLOPS / 3600, (self.latent_bytes, self.text_bytes)
        latents, texts = (f"{size / 1e12:.3g} TB" if size >= 1e11 else f"{size / 1e9:.3g} GB" for size in parts)
        cost = f", about {hours:,.1f} GPU-hours at {_ENCODING_FLOPS / 1e12:.0f} TFLOP/s" if self.flops else ""
        again = f"every {self.views} passes" if self.views > 1 else "every pass"
        return (
            f"{self.samples:,} samples in {self.views} view{'s' * (self.views > 1)} are {latents} of latents and at "
            f"most {texts} of captions{cost}; windows, captions and buckets of a clip then come again {again}, "
            "noise, times and dropout do not"
        )


def store_folder(dataset: DatasetConfig, stage: int) -> Path:
    """Where the store of a run lies by default: `dataset.latents`, else beside the table, each stage's by itself."""
    table = dataset.data_path if dataset.mix is None else dataset.mix[0][0]
    beside = Path(table).with_suffix(f".stage{stage}.latents" if stage else ".latents")
    return Path(dataset.latents) if dataset.stored else beside


def is_store(folder: Path) -> bool:
    """Whether latents have been encoded into a folder."""
    return (folder / STORE_FILE).is_file()


def store_size(
    config: SystemConfig,
    dataset: DatasetConfig,
    rule: BucketLaw,
    stage: int,
    table: ClipTable | MixedTable,
    kinds: Mapping[str, float] | None = None,
) -> StoreSize:
    """From the first view, the others being like it; nothing is read of clips or weights."""
    rows, _, codes = view_samples(encode_inputs(config.seed, dataset, rule, table, stage), 0)
    views, windows = dataset.views, windows_of(config, kinds, rule.buckets, config.ae.latent)
    stored, flops, captions = 0.0, 0.0, 0
    clips = np.bincount(codes[np.unique(rows, return_index=True)[1]], minlength=len(rule.buckets)).tolist()
    for index, count in enumerate(np.bincount(codes, minlength=len(rule.buckets)).tolist()):
        if not count:
            continue
        shape = rule.buckets[index].shape
        apart = windows.get(shape[0], {}).values()
        stored += count * _sample_bytes(config, shape, sum(len(window.frames) for window in apart))
        costs = [*encoding_costs(config, shape, 1).values(), *companions_costs(config, shape, 1)]
        costs += [autoencoder_cost(config.ae, (len(window.pixels), *shape[1:]), 1) for window in apart]
        flops += count * sum(cost.flops for cost in costs)
        captions += clips[index] * captions_of_sample(config, shape[0])
    texts = 0
    for text in config.family.texts:
        section = getattr(config, text.section)
        length = 1 if text.pooled else section.max_length
        texts += length * section.dim * _BYTES[getattr(section, "dtype", "fp32")]
    captions *= min(views, len(dataset.captions or "1"))
    return StoreSize(views * len(rows), views, views * stored, captions * texts, views * flops)


def _sample_bytes(config: SystemConfig, shape: tuple[int, int, int], frames_apart: int) -> int:
    """Of the latents of a sample of (T, H, W) pixels, of so many latent frames that are encoded apart, and of what its
    clip brings along."""
    channels, frames, *sides = config.ae.latent(*shape)
    of_frame = channels * prod(sides) * _BYTES[getattr(config.ae, "dtype", "fp32")]
    moments = 2 if config.ae.is_random else 1
    found = moments * of_frame * (frames + frames_apart)
    for one in config.sample_rules.companions:
        found += {
            "video": moments * of_frame * frames,
            "stills": one.most * of_frame,
            "numbers": shape[0] * one.width * _BYTES["fp32"],
        }[one.kind]
    return found


def choose_store(
    config: SystemConfig,
    dataset: DatasetConfig,
    rule: BucketLaw,
    stage: int,
    world: World,
    workers: int,
    say: Callable[[str], None],
    kinds: Mapping[str, float] | None = None,
) -> Path | None:
    """Return the store that a run with `latents = "auto"` trains from, made here where it is not there and small
    enough; None where the run encodes by itself, also since the store that is there is of something else. The
    samples are the same either way. Collective."""
    folder = store_folder(dataset, stage)
    options = world.on_main(lambda: _options(folder, workers))

    def decide() -> tuple[bool, str]:
        size = store_size(config, dataset, rule, stage, open_clips(dataset, config.sample_rules.columns), kinds)
        if all((folder / f"{name}.arrow").is_file() for name in INDEX_NAMES.values()):
            return True, f"{size}; they are in {folder}"
        parent = next(each for each in folder.absolute().parents if each.is_dir())
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())  # before an interruption
        limit = min(dataset.latents_max_gb * 1e9, (shutil.disk_usage(parent).free + written) / 2)
        if size.latent_bytes + size.text_bytes <= limit:
            return True, f"{size}; they are encoded first, in {folder}"
        why = f"above {limit / 1e9:,.0f} GB (dataset.latents_max_gb, and half of what is free), so the run encodes"
        return False, f"{size}; {why} by itself; `longtake data encode RUN -o {folder}` makes the store"

    stored, said = world.on_main(decide)
    if world.is_main:
        say(f"dataset.latents = 'auto': {said}")
    if not stored:
        return None
    tenths = set(range(10))

    def progress(done: int, total: int) -> None:
        if world.is_main and done and (tenth := 10 * done // total) in tenths:
            tenths.difference_update(range(tenth + 1))
            say(f"encoded {done:,} of {total:,} samples and captions of this process")

    try:
        encode(config, dataset, rule, stage, options, world, progress, kinds, say)
    except OtherStore as error:
        if world.is_main:
            say(f"dataset.latents = 'auto': {error.said}, so the run encodes by itself")
        return None
    finally:
        world.free_memory()
    return folder


def _options(folder: Path, workers: int) -> EncodeOptions:
    """How a store is made; one that is there, as it was begun."""
    made = read_facts(folder)["made"] if is_store(folder) else {}
    begun = {name: made[name] for name in ("dtype", "shard_bytes") if name in made}
    return EncodeOptions(folder, num_workers=workers, **begun)
