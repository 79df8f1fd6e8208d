"""Fitting an autoencoder on the clips of a run before its first step: which clips, their sums over ranks, the file."""

from __future__ import annotations

import filecmp
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from longtake.buckets.protocol import BucketLaw
from longtake.contracts import Slot, UserError
from longtake.data.clips.transforms import to_unit
from longtake.data.config import DatasetConfig
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.mix import open_clips
from longtake.durable import write_whole
from longtake.encode.plan import encode_inputs, slot_of, view_samples
from longtake.encoders.autoencoder_config import AUTOENCODER_FILE, LinearConfig
from longtake.encoders.files import find_encoder
from longtake.encoders.linear import (
    BlockStatistics,
    LinearAutoencoder,
    principal_components,
    psnr_of_round_trip,
    split_blocks,
)
from longtake.parallel.world import World
from longtake.random import Purpose, uniforms
from longtake.system.config import SystemConfig

C = TypeVar("C", bound=SystemConfig)
_MOST_CLIPS, _MOST_HELD_OUT = 640, 64
_HELD_OUT = 1 / 8  # of the clips that are looked at: their round trip is measured, and decides nothing
_BLOCKS_PER_NUMBER = 2  # blocks for each number of a block, and at least so many:
_LEAST_BLOCKS = 6144
_SHARDS = 8  # of the clips; sums are added shard by shard, so that every number of ranks gives the same bits
_CLIPS_AT_ONCE = 16


def fit_autoencoder(
    config: C,
    dataset: DatasetConfig,
    rule: BucketLaw,
    stage: int,
    folder: Path,
    world: World,
    say: Callable[[str], None],
    earlier: Sequence[Path] = (),
) -> C:
    """Return the config with its autoencoder in `folder`, fitted now where the file is not there yet. Collective.

    `earlier`: folders of runs or stores whose latents this run is to understand; the first that has a file gives it.
    The file that `ae.from_pretrained` names is copied. Other autoencoders are left alone. Raises `UserError` where no
    clip can be read, and for a file other than that in the folder.
    """
    if not isinstance(config.ae, LinearConfig):
        return config
    file, named = folder / AUTOENCODER_FILE, config.ae.from_pretrained

    def take() -> bool:
        if named is not None:
            return _copied(find_encoder(named, "ae.from_pretrained", config.ae.cache_dir), file)
        for other in (place / AUTOENCODER_FILE for place in earlier):
            if not file.is_file() and other.is_file():
                _copied(other, file)
        return file.is_file()

    if not world.on_main(take):
        _Fit(config, dataset, rule, stage, world).write(file, say)
    ae = config.ae.model_copy(update={"from_pretrained": str(file)})
    return config.model_copy(update={"ae": ae})


def _copied(source: Path, target: Path) -> bool:
    """Copy the file of a fitted autoencoder. Raises `UserError` where another one is there."""
    if not target.is_file():
        write_whole(target, source.read_bytes())
    elif not filecmp.cmp(source, target, shallow=False):
        raise UserError(
            f"ae.from_pretrained = {str(source)!r}: differs from {target}, which the run was started with; leave the "
            "key out, or start a new run"
        )
    return True


class _Fit:
    """One fit: its clips, dealt out over the ranks."""

    def __init__(self, config: SystemConfig, dataset: DatasetConfig, rule: BucketLaw, stage: int, world: World) -> None:
        assert isinstance(config.ae, LinearConfig), "the only autoencoder that is fitted"
        self.section, self.rule, self.world = config.ae, rule, world
        self.start = time.perf_counter()
        table = world.on_all(lambda: open_clips(dataset, config.sample_rules.columns))
        inputs = encode_inputs(config.seed, dataset, rule, table, stage)
        rows, samples, buckets = view_samples(inputs, 0)
        order = np.argsort(uniforms(0, 0, Purpose.AUTOENCODER, 0, samples, 1)[:, 0], kind="stable")[:_MOST_CLIPS]
        self.rows, self.samples, self.buckets = rows[order], samples[order], buckets[order]
        settings = {"seed": config.seed, "stage": stage, "latent": self.section.latent}
        self.dataset = SlotDataset(table, dataset, rules=config.sample_rules, law=rule, **settings)
        self.num_held_out = min(_MOST_HELD_OUT, int(_HELD_OUT * len(order)))

    def write(self, file: Path, say: Callable[[str], None]) -> None:
        """Fit and write. Collective."""
        statistics = self.sums()
        weights: dict[str, Tensor] = {}

        def solve() -> None:
            for name, sums in statistics.items():
                found = principal_components(sums, self.section)
                weights.update({f"{name}.{key}": value for key, value in found.items()})

        self.world.on_main(solve)
        psnr = self.world.on_main(lambda: self.round_trip(weights))
        facts = {
            "psnr": float(np.mean(psnr)),
            "worst_psnr": float(np.min(psnr)),
            "clips": len(self.rows) - self.num_held_out,
            "held_out": len(psnr),
        }
        self.world.on_main(lambda: write_whole(file, save(weights, {"fit": json.dumps(facts)})))
        say(
            f"autoencoder: {self.section.channels} components fitted on {facts['clips']} clips in "
            f"{time.perf_counter() - self.start:.1f} s; a round trip of {facts['held_out']} held-out clips keeps "
            f"{facts['psnr']:.1f} dB PSNR, {facts['worst_psnr']:.1f} dB in the worst: the ceiling of this run"
        )

    def sums(self) -> Mapping[str, BlockStatistics]:
        """Return the statistics of every part, the same bits on every rank. Collective."""
        sizes = {"blocks": self.section.block_size}
        if self.section.first_alone:
            sizes["first"] = self.section.frame_size
        total = {name: BlockStatistics(size) for name, size in sizes.items()}
        for shard in range(_SHARDS):
            own = {name: BlockStatistics(size) for name, size in sizes.items()}
            chosen = np.arange(self.num_held_out + shard, len(self.rows), _SHARDS)

            def add(own: dict[str, BlockStatistics] = own, chosen: np.ndarray = chosen) -> None:
                for video, samples in self.videos(chosen):
                    for name, blocks in split_blocks(self.section, video).items():
                        own[name].add(self.some_blocks(blocks.flatten(1, 3), samples))

            is_own = shard % self.world.size == self.world.rank
            self.world.on_all(add if is_own else lambda: None)
            for name, statistics in own.items():
                if self.world.size > 1:  # all but one rank give zeros, so nothing is rounded
                    sums = statistics.sums.to(self.world.device)
                    dist.all_reduce(sums)
                    statistics.sums = sums.cpu()
                total[name].sums += statistics.sums
        if not total["blocks"].count and not (self.section.first_alone and total["first"].count):
            raise UserError(
                f'ae.type = "{self.section.type}": none of {len(self.rows)} clips that it is fitted on can be read; '
                "check dataset.root, or name a fitted file as ae.from_pretrained"
            )
        return {name: statistics for name, statistics in total.items() if statistics.count}

    def some_blocks(self, blocks: Tensor, samples: np.ndarray) -> Tensor:
        """Blocks `[B, N, D]` of clips -> `[n, D]`: as many of each clip, drawn by its sample, as make enough of all."""
        wanted = max(_LEAST_BLOCKS, _BLOCKS_PER_NUMBER * blocks.shape[2])
        share = ceil(wanted / max(1, len(self.rows) - self.num_held_out))
        if share < blocks.shape[1]:
            drawn = uniforms(0, 1, Purpose.AUTOENCODER, 0, samples, blocks.shape[1])
            places = torch.from_numpy(np.argsort(drawn, axis=1, kind="stable")[:, :share])
            blocks = blocks.gather(1, places[:, :, None].expand(-1, -1, blocks.shape[2]))
        return blocks.flatten(0, 1)

    def round_trip(self, weights: Mapping[str, Tensor]) -> list[float]:
        """PSNR of each held-out clip; of the fitted ones where too few clips are there to hold any out."""
        autoencoder = LinearAutoencoder(self.section)
        parts = nn.ModuleDict(autoencoder.encoding).to_empty(device="cpu")
        if missing := parts.state_dict().keys() - weights.keys():  # no clip has more than one frame
            raise UserError(
                f"ae.first_alone = {self.section.first_alone}: no clip of the run has the frames of {min(missing)}; "
                "add longer clips, or name a fitted file as ae.from_pretrained"
            )
        parts.load_state_dict(dict(weights))
        number = self.num_held_out or len(self.rows)
        found = psnr_of_round_trip(autoencoder, [video for video, _ in self.videos(np.arange(number))])
        if not found:
            raise UserError(f'ae.type = "{self.section.type}": none of {number} held-out clips can be read')
        return found

    def videos(self, chosen: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] and sample ids of those of the chosen clips that can be read."""
        for bucket in np.unique(self.buckets[chosen]).tolist():
            of_bucket = chosen[self.buckets[chosen] == bucket]
            for start in range(0, len(of_bucket), _CLIPS_AT_ONCE):
                part = of_bucket[start : start + _CLIPS_AT_ONCE]
                slot: Slot = slot_of(self.rule, 0, bucket, self.rows[part], self.samples[part])
                batch = self.dataset.read(slot, {})
                good = batch.weights.bool()
                if good.any():
                    yield to_unit(batch.video[good]), self.samples[part][good.numpy()]
