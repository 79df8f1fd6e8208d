"""Training data of a run: its clips or stored latents, their order, which rank computes which bucket, the stream of
steps."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from longtake.buckets.held_back import choose_held_back
from longtake.buckets.inputs import OrderInputs
from longtake.checkpoint.state import RunState, SlotSizes
from longtake.contracts import Bucket, UserError
from longtake.data.latents.dataset import StoredDataset
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.loader import SlotLoader, machine_bytes
from longtake.data.loading.quarantine import read_quarantine
from longtake.data.tables.mix import MixedTable, clip_weights, open_clips, order_columns
from longtake.data.tables.table import ClipTable
from longtake.encode.auto import choose_store, is_store, store_folder
from longtake.encode.fit import FittingStore, open_fitting_store
from longtake.evaluate.validation import FOLDER
from longtake.parallel.degrees import BucketPeers, EntryKey, bucket_degrees
from longtake.parallel.world import World
from longtake.random import Purpose, uniforms
from longtake.system.build import System
from longtake.system.encoders import missing_files, raise_missing, refuse_sharded_text
from longtake.system.examples import KnownDraw, stored_windows, wanted_draws
from longtake.train.config import RunConfig
from longtake.train.cost import cost_model
from longtake.train.folder import QUARANTINE_FILE
from longtake.train.stream import StepStream

Say = Callable[[str], None]  # puts a line on this rank's terminal
Table = ClipTable | MixedTable


@dataclass(frozen=True)
class RunData:
    """Sources of the samples."""

    table: Table
    latents: FittingStore | None  # None: the run encodes by itself
    held_out: Table | None = None  # that of `validation.data_path`

    @property
    def tables(self) -> tuple[ClipTable, ...]:
        """The tables of a mix, or the one there is."""
        return self.table.tables if isinstance(self.table, MixedTable) else (self.table,)


def open_tables(config: RunConfig) -> tuple[Table, Table | None]:
    """Return the table of clips, and that of held-out ones where one is named. Raises `UserError` that names every
    file of the run that is missing, weights and encoders among them, before any is downloaded."""
    tables: list[Table | None] = []
    faults: list[str] = []
    for opened in (
        lambda: open_clips(config.dataset, config.sample_rules.columns),
        lambda: open_held_out_table(config),
    ):
        try:
            tables.append(opened())
        except UserError as error:
            faults.append(str(error))
    raise_missing(faults + missing_files(config, with_encoders=config.dataset.latents is None))
    table, held_out = tables
    assert table is not None, "it was opened"
    return table, held_out


def open_held_out_table(config: RunConfig) -> Table | None:
    """Return the table of held-out clips, where one is named. Raises `UserError` as `open_clips` does."""
    if config.validation is None or config.validation.data_path is None:
        return None
    dataset = config.dataset.model_copy(update={"data_path": config.validation.data_path, "mix": None})
    return open_clips(dataset, config.sample_rules.columns)


def settle_latents(
    config: RunConfig, started: Mapping[str, Any] | None, world: World, say: Callable[[str], None]
) -> RunConfig:
    """Return the run with `dataset.latents` decided where it is "auto"; as in `started`, what a run that is
    continued was started with, unless that store is gone. Its folder keeps it, so that later launches decide
    nothing. Collective."""
    if config.dataset.latents != "auto":
        return config
    kept = "auto" if started is None else started.get("dataset", {}).get("latents")
    if kept not in (None, "auto") and not world.on_main(lambda: is_store(Path(kept))):
        say(f"dataset.latents = 'auto': {kept}, the store that this run was started with, is gone")
        kept = "auto"
    own = str(store_folder(config.dataset, config.stage_number))
    if kept in ("auto", own):  # what is not in the store is encoded first
        what = config.dataset, config.bucket_rule, config.stage_number
        folder = choose_store(config, *what, world, config.num_workers, say, config.condition_config)
        kept = folder and str(folder)
    else:
        how = "the run encodes by itself" if kept is None else f"latents are in {kept}"
        say(f"dataset.latents = 'auto': {how}, as this run was started")
    return config.model_copy(update={"dataset": config.dataset.model_copy(update={"latents": kept})})


def open_latents(config: RunConfig, table: Table, world: World) -> FittingStore | None:
    """Return the store that the run trains from, once it has proved to fit; None for a run that encodes by itself."""
    if config.dataset.latents is None:
        return None
    kinds, rule = config.condition_config, config.bucket_rule
    latents = open_fitting_store(config, config.dataset, rule, table, config.stage_number, kinds, world)
    refuse_sharded_text(config, latents.missing)
    stored_windows(config, kinds, rule.buckets, latents.store)  # refuses what is missing
    return latents


def open_stream(
    config: RunConfig, system: System, data: RunData, state: RunState, world: World, folder: Path, say: Say
) -> StepStream:
    """Return the steps of a run in `folder` from the moment of `state` on; its loader is to be closed. Collective."""
    peers = _bucket_peers(config, system, config.bucket_rule.buckets)
    inputs = _order_inputs(config, system, peers, data.table, state, world)
    quarantine = folder / QUARANTINE_FILE
    loader = _open_loader(config, system, data.table, data.latents, quarantine, world, say)
    return StepStream(inputs, loader, peers, world, quarantine, say, data.table.source)


def open_held_out(
    config: RunConfig, system: System, data: RunData, peers: BucketPeers, world: World, folder: Path, say: Say
) -> StepStream:
    """Return the held-out clips as steps of one pass, always the same: those of `validation.data_path`, or the ones
    that are held back of the run's own. Collective."""
    section, rule = config.validation, config.bucket_rule
    assert section is not None, "a run without validations"
    table, latents = (data.table, data.latents) if data.held_out is None else (data.held_out, None)
    held_back = np.ones(len(table), bool) if data.held_out is not None else _held_back(config, table)
    if not held_back.any():
        raise UserError(
            f"validation.heldout = {section.heldout:g}: holds none of {len(table)} clips back, because every bucket "
            "keeps its last clip; write a larger share, or name other clips as validation.data_path"
        )
    rows = np.flatnonzero(held_back)
    rows = rows[np.argsort(_validation_numbers(table.clip_ids[rows]), kind="stable")][: section.clips]
    chosen = np.zeros(len(table))
    chosen[rows] = 1.0
    inputs = OrderInputs(
        config.seed,
        config.stage_number,
        peers.mesh.data_ranks,
        rule,
        weights=chosen,
        **order_columns(table),
    )
    quarantine = folder / FOLDER / QUARANTINE_FILE
    world.on_main(lambda: quarantine.parent.mkdir(exist_ok=True))
    loader = _open_loader(config, system, table, latents, quarantine, world, say)
    return StepStream(inputs, loader, peers, world, quarantine, say)


def _held_back(config: RunConfig, table: Table) -> np.ndarray:
    """Return, as bool [N], the clips that `validation.heldout` keeps out of the training, the same in all runs of these
    buckets."""
    assert config.validation is not None, "a run without validations"
    weights = clip_weights(config.dataset, table.num_frames, table.weights)
    inputs = OrderInputs(
        config.seed, config.stage_number, 1, config.bucket_rule, weights=weights, **order_columns(table)
    )
    return choose_held_back(inputs, _validation_numbers(table.clip_ids), config.validation.heldout)


def _validation_numbers(clip_ids: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each clip: those with the lowest are held back and measured."""
    return uniforms(0, 0, Purpose.VALIDATION, 0, np.asarray(clip_ids, np.uint64), 1)[:, 0]


def _open_loader(
    config: RunConfig,
    system: System,
    table: Table,
    latents: FittingStore | None,
    quarantine: Path,
    world: World,
    say: Say,
) -> SlotLoader:
    """Open the loader that makes batches of the clips of a table, or of their latents; to be closed. Collective."""
    rule = config.bucket_rule
    make: Callable[..., SlotDataset] = SlotDataset
    if latents is not None:
        windows = stored_windows(config, config.condition_config, rule.buckets, latents.store)
        make = partial(StoredDataset, latents.store, windows=windows)
    dataset = make(
        table,
        config.dataset,
        seed=config.seed,
        stage=config.stage_number,
        latent=system.latent,
        draws=wanted_draws(config, system.objective.draws, system.facts.posterior),
        known=KnownDraw.create(system.law, config.condition_config, system.latent),
        rules=config.sample_rules,
        law=rule,
        quarantined=read_quarantine(quarantine),
    )
    return SlotLoader(
        dataset,
        config.num_workers,
        config.prefetch_factor,
        limit_bytes=_host_bytes(config, world),
        say=say,
        frozen_seconds=config.dataset.timeout_seconds or None,
    )


def _order_inputs(
    config: RunConfig, system: System, peers: BucketPeers, table: Table, state: RunState, world: World
) -> OrderInputs:
    """Return the inputs that the order of every epoch is a function of."""
    rule = config.bucket_rule
    if system.encoders is not None:
        for bucket in rule.buckets:
            config.check_shape(*bucket.shape)
    slots = config.slots_per_step or state.slots_per_step or config.slots_at(peers.mesh.data_ranks)
    cost = None
    if config.dataset.balance:
        cost = cost_model(config, system, slots, state.data, world, peers)
    weights, held_back = clip_weights(config.dataset, table.num_frames, table.weights), None
    if config.validation is not None and config.validation.heldout:
        held_back = _held_back(config, table)
        weights = np.where(held_back, 0.0, weights)
    return OrderInputs(
        seed=config.seed,
        stage=config.stage_number,
        slots_per_step=slots,
        rule=rule,
        weights=weights,
        held_back=held_back,
        views=config.dataset.views,
        cost=cost,
        slot_sizes=_slot_sizes(config, peers, rule.buckets, state.slot_sizes),
        **order_columns(table),
    )


def _host_bytes(config: RunConfig, world: World) -> int:
    """Return this rank's part of its machine's memory for batches made ahead."""
    gb, name = config.dataset.max_host_gb, socket.gethostname()
    ranks_here = world.gather(name).count(name)
    return int((machine_bytes() / 4 if gb is None else gb * 1e9) / ranks_here)


def _bucket_peers(config: RunConfig, system: System, buckets: Sequence[Bucket]) -> BucketPeers:
    """Return the peers of every entry of the bucket table, as `parallel.bucket_sequence` wants them. Collective."""

    def tokens(bucket: Bucket) -> int:
        return system.tokens(bucket.shape) + system.facts.text_length

    degrees = bucket_degrees(config.parallel, system.mesh.sequence, buckets, tokens)
    return BucketPeers.create(system.mesh, degrees, system.cut, type(system.denoiser).heads(config.model))


def _slot_sizes(
    config: RunConfig, peers: BucketPeers, buckets: Sequence[Bucket], kept: SlotSizes | None
) -> dict[EntryKey, int]:
    """Micro-batches of a slot of each entry: those that the peers of one data rank run side by side.

    They are settled at first launch, so that other meshes make the same steps: as long as the setting and the batch
    sizes are those of the checkpoint (`kept`), its sizes stay.
    """
    if kept is not None and kept.of == _basis(config, buckets):
        return {(name, int(t)): size for name, sizes in kept.sizes.items() for t, size in sizes.items()}
    return {bucket.entry: peers.at_once(bucket) for bucket in buckets}


def slot_sizes_kept(config: RunConfig, inputs: OrderInputs) -> SlotSizes:
    """Return the sizes, and what they follow from, for checkpoints."""
    found: dict[str, dict[str, int]] = {}
    for (name, num_frames), size in inputs.slot_sizes.items():
        found.setdefault(name, {})[str(num_frames)] = size
    return SlotSizes(_basis(config, inputs.rule.buckets), found)


def _basis(config: RunConfig, buckets: Sequence[Bucket]) -> Any:
    """Return the setting, and the batch sizes that an "auto" weighs, as they come back from JSON."""
    batch_sizes = {f"{bucket.resolution}/{bucket.num_frames}": bucket.batch_size for bucket in buckets}
    return json.loads(json.dumps([config.parallel.bucket_sequence, batch_sizes], sort_keys=True))
