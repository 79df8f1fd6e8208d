"""A training run from its command line to its last checkpoint."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longtake.buckets import OrderInputs, PassOrder
from longtake.checkpoint import keep_frozen, load_tensors, read_state, restore_frozen
from longtake.config import Dialect, dump_config
from longtake.contracts import UserError
from longtake.data import (
    ClipTable,
    MixedTable,
    SlotDataset,
    SlotLoader,
    StoredDataset,
    machine_bytes,
    open_clips,
    order_columns,
    read_quarantine,
    told_captions,
)
from longtake.encode import FittingStore, open_fitting_store
from longtake.parallel import BucketPeers, Entry, Mesh, World, check_bucket_sequence, start_world
from longtake.plan import amount
from longtake.system import System, build_system, refuse_sharded_text, stored_windows
from longtake.track import StepMeter, Trackers, TrainingProgress, make_console, peak_flops
from longtake.train.average import Ema
from longtake.train.clock import Clock
from longtake.train.config import RunConfig
from longtake.train.cost import cost_model
from longtake.train.folder import (
    QUARANTINE_FILE,
    FolderLock,
    RunFolder,
    give_up,
    given_up_on_error,
    open_folder,
    read_run,
    save_config,
    take_over_quarantine,
)
from longtake.train.goodput import Stopwatch
from longtake.train.interrupt import FirstStepTimer, StopRequest, ended_by_signals, held_signals
from longtake.train.loop import Trainer
from longtake.train.lost import LostSamples
from longtake.train.optimizer import ShardedAdamW
from longtake.train.record import Recorder
from longtake.train.saving import Saver
from longtake.train.skipped import SkippedSteps
from longtake.train.slots import bucket_peers, slot_sizes, slot_sizes_json
from longtake.train.stream import StepStream
from longtake.train.watchdog import Watchdog, collective_timeout, record_collectives


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    checkpoint: Path | None  # the last one written
    clock: Clock
    stopped: bool  # by Ctrl-C or SIGTERM


def train_run(
    run: str, overrides: Sequence[str] = (), console: Console | None = None, dialect: Dialect | None = None
) -> Outcome:
    """`longtake train`: reads RUN (a config file or the folder of an earlier run), joins the processes, trains."""
    resolved = read_run(run, overrides, dialect=dialect)
    config = resolved.value
    record_collectives()
    limit = collective_timeout(config.first_step_timeout, config.watchdog_seconds)
    with ended_by_signals(), start_world(config.device, limit) as world:
        return train(config, world, source=run, console=console)


def train(config: RunConfig, world: World, source: str, console: Console | None = None) -> Outcome:
    """Trains one run on the processes of `world`; `source` names its config file or the folder it continues."""
    launched, timer = time.time(), FirstStepTimer(config.first_step_timeout)
    stream = saver = watchdog = trackers = lock = None
    console = console or make_console()
    try:
        mesh = Mesh.create(config.parallel, world)
        check_bucket_sequence(config.parallel, mesh.sequence)
        table = world.on_all(lambda: open_clips(config.dataset))
        with ExitStack() as until_the_first_step:
            with held_signals():
                place = open_folder(config, world, source)
                until_the_first_step.enter_context(given_up_on_error(place, world))
            lock = FolderLock(place, world)
            watchdog = _watchdog(config, place, world)
            timer.report = watchdog.report
            latents = _open_latents(config, table, world)
            facts_of_encoders = None if latents is None else latents.facts
            system = build_system(config, mesh, world, facts_of_encoders, restored=place.checkpoint is not None)
            if latents is not None and system.encoders is not None:
                latents.refuse_other_weights(system.encoders, world)
            optimizer = ShardedAdamW(system.denoiser, config)
            ema = _average(config, system)
            start = _restore(config, place, system, optimizer, ema)
            if place.checkpoint is not None and start.finished(config):
                return _nothing_to_train(config, place, start, world, console)
            take_over_quarantine(place, world)
            lost = world.on_main(lambda: _lost_so_far(config, start, place))
            slots = start.slots_per_step or mesh.data_ranks * config.accumulation_steps
            rule = config.bucket_rule
            peers = bucket_peers(config, system, mesh, rule.buckets)
            sizes = slot_sizes(config, peers, rule.buckets, start.state)
            inputs = _order_inputs(config, system, peers, table, slots, sizes, start.position, world)
            stream = _stream(config, inputs, table, latents, system, peers, world, place.path, console)
            order = stream.plan(start.clock.pass_index, start.position)
            save_config(place, config, world)
            frozen = _keep_frozen(config, place, system)
            trackers = _trackers(config, place.path, world, start.clock.global_step)
            if world.is_main:
                console.print(_announcement(config, place, system, start, order, world), markup=False)
                tables = table.tables if isinstance(table, MixedTable) else (table,)
                console.print(told_captions(tables, config.dataset.captions), markup=False)
                if latents is not None:
                    console.print(str(latents), markup=False)
            facts = {"config": dump_config(config), "name": place.path.name, "slots_per_step": inputs.slots_per_step}
            facts |= {"slot_sizes": slot_sizes_json(config, sizes, rule.buckets)}
            facts |= {"frozen": frozen, "adapters": system.adapter_scaling()} if frozen else {}
            saver = Saver(place.path, world, facts, config.keep_n_latest, config.keep_every, config.async_io)
            stopwatch = Stopwatch(place.path, start.seconds, launched, place.restarted, enabled=world.is_main)
            if place.checkpoint is not None and place.continues:
                saver.started_from(place.checkpoint, start.clock)
        with (
            StopRequest(announce=world.is_main) as stop,
            TrainingProgress(
                _total_steps(config, start, order),
                start.clock.global_step,
                console=console,
                every=config.log_every,
                enabled=world.is_main,
            ) as progress,
        ):
            skipped = SkippedSteps(config.skip_grad_norm, config.max_skipped, total=start.skipped_steps)
            meter = StepMeter(_peak(config, world), world.size)
            parts = (trackers, progress, meter, config.log_every, timer, skipped, stopwatch, watchdog, lost)
            recorder = Recorder(system, table, world, *parts)
            trainer = Trainer(
                config, mesh, peers, system, optimizer, ema, stream, recorder, saver, stop, start.clock, start.position
            )
            trainer.run(order, start.skip)
    finally:
        timer.done()
        for part in (watchdog, saver, trackers, stream.loader if stream is not None else None, lock):
            if part is not None:
                part.close()
    if world.is_main:
        stopwatch.write()
        console.print(str(stopwatch.seconds), markup=False)
        ended = "stopped" if trainer.stopped else "done"
        console.print(f"{ended} at step {trainer.clock.global_step}; checkpoint: {saver.last}", markup=False)
        if trainer.stopped:
            console.print(f"to go on: longtake train {place.path}", markup=False)
    return Outcome(place.path, saver.last, trainer.clock, trainer.stopped)


def _total_steps(config: RunConfig, start: Start, order: PassOrder) -> int:
    """The step the run ends at, for the progress bar; later passes are taken to be as long as this one."""
    if config.max_steps is not None:
        return config.max_steps
    later = max(0, config.epochs - start.clock.pass_index - 1)
    return start.clock.global_step + order.num_steps - start.skip + later * order.report.num_steps


def _peak(config: RunConfig, world: World) -> float | None:
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None


@dataclass(frozen=True)
class Start:
    """Where a run begins: zero, or the moment of a checkpoint."""

    clock: Clock
    position: dict | None
    skip: int  # steps of the pass to leave out
    slots_per_step: int | None
    skipped_steps: int = 0  # that were left out up to then
    seconds: Mapping[str, float] = field(default_factory=dict)  # where time went up to then
    state: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's `run.json`

    def finished(self, config: RunConfig) -> bool:
        """Whether the run has made all its steps."""
        return config.max_steps is not None and self.clock.global_step >= config.max_steps


def _nothing_to_train(config: RunConfig, place: RunFolder, start: Start, world: World, console: Console) -> Outcome:
    """The end of a launch that finds its last step made: one line, and every file as it was."""
    give_up(place, world)
    if world.is_main:
        step = start.clock.global_step
        console.print(
            f"max_steps = {config.max_steps}: the run is at step {step} already; nothing to train", markup=False
        )
    assert place.checkpoint is not None
    return Outcome(place.checkpoint.parent, place.checkpoint, start.clock, stopped=False)


def _restore(config: RunConfig, place: RunFolder, system: System, optimizer: ShardedAdamW, ema: Ema | None) -> Start:
    """Fills weights, averages and optimizer from the checkpoint the run starts from, and reads its clock and position.

    `start_epoch` and `start_step` move the data position only, to a pass dealt anew (`start_step` alone: the pass
    under way); the optimizer and the step counter go on.
    """
    if place.checkpoint is None:
        return _moved(config, Start(Clock(), None, 0, config.slots_per_step))
    state = read_state(place.checkpoint)
    _refuse_other_scaling(place.checkpoint, state.get("adapters", {}), system.adapter_scaling())
    clock = Clock.from_json(state.get("clock", {}))
    into = {f"model.{name}": p.data for name, p in optimizer.parameters.items()} | optimizer.state()
    load_tensors(place.checkpoint, into)
    restore_frozen(place.checkpoint, system.frozen(), state.get("frozen"))
    skipped = int(state.get("skipped_steps", 0))
    optimizer.set_updates(clock.global_step - skipped)
    if ema is not None and not load_tensors(place.checkpoint, ema.state(), strict=False).filled:
        ema.restart()  # the checkpoint kept no average: it begins at the loaded weights
    slots = config.slots_per_step or state.get("slots_per_step")
    seconds = state.get("seconds", {}) if place.continues else {}
    start = Start(clock, state.get("data"), 0, slots, skipped, seconds, state)
    return start if place.restarted and place.continues else _moved(config, start)


def _refuse_other_scaling(checkpoint: Path, saved: Mapping[str, float], here: Mapping[str, float]) -> None:
    """Raises `UserError` where adapters would have another weight in the model than the one they were trained at."""
    changed = [layer for layer in here if layer in saved and not isclose(saved[layer], here[layer])]
    if changed:
        raise UserError(
            f"lora.alpha: the adapters in {checkpoint} were trained with alpha / rank = {saved[changed[0]]:g} "
            f"({changed[0]}), the run has {here[changed[0]]:g}; leave lora.alpha as it was"
        )


def _average(config: RunConfig, system: System) -> Ema | None:
    if config.ema_decay is None:
        return None
    return Ema(system.denoiser, config.ema_decay, ramp=config.compat is None, offload=config.ema_offload)


def _moved(config: RunConfig, start: Start) -> Start:
    if config.start_epoch is None and config.start_step is None:
        return start
    if config.start_epoch is not None and config.start_epoch >= config.epochs:
        raise UserError(
            f"start_epoch = {config.start_epoch}: passes count from 0, so epochs = {config.epochs} leaves none to "
            f"train; choose at most {config.epochs - 1}, or raise epochs"
        )
    pass_index = start.clock.pass_index if config.start_epoch is None else config.start_epoch
    return replace(start, clock=replace(start.clock, pass_index=pass_index), position=None, skip=config.start_step or 0)


def _keep_frozen(config: RunConfig, place: RunFolder, system: System) -> dict | None:
    """What every checkpoint of the run says of the parameters that are not trained; None where all are."""
    frozen = system.frozen()
    return keep_frozen(place.path, frozen, config.model.from_pretrained) if frozen else None


def _watchdog(config: RunConfig, place: RunFolder, world: World) -> Watchdog:
    reports = world.broadcast(f"hang-{time.strftime('%y%m%d_%H%M%S')}")
    return Watchdog(config.watchdog_seconds, place.path / reports, world.rank, world.size)


def _lost_so_far(config: RunConfig, start: Start, place: RunFolder) -> LostSamples:
    """The samples tried and lost up to the checkpoint. Raises `UserError` where they are too many already."""
    quarantine = place.path / QUARANTINE_FILE
    lost = LostSamples.going_on(start.state, len(read_quarantine(quarantine)))
    if lost.too_many(config.dataset):
        raise lost.refusal(config.dataset, quarantine)
    return lost


def _open_latents(config: RunConfig, table: ClipTable | MixedTable, world: World) -> FittingStore | None:
    """The store that the run trains from, once it has proved to fit; None for a run that encodes by itself."""
    if config.dataset.latents is None:
        return None
    latents = open_fitting_store(config, config.dataset, config.bucket_rule, table, config.stage_number, world)
    refuse_sharded_text(config.t5, latents.missing)
    stored_windows(config.condition_config, config.bucket_rule.buckets, latents.store)  # refuses what it has not
    return latents


def _order_inputs(
    config: RunConfig,
    system: System,
    peers: BucketPeers,
    table: ClipTable | MixedTable,
    slots_per_step: int,
    sizes: Mapping[Entry, int],
    position: dict | None,
    world: World,
) -> OrderInputs:
    rule = config.bucket_rule
    if system.encoders is not None:
        for bucket in rule.buckets:
            system.autoencoder.check(*bucket.shape)
    cost = None
    if config.dataset.balance:
        cost = cost_model(config, system, rule.buckets, slots_per_step, position, world, peers)
    return OrderInputs(
        seed=config.seed,
        stage=config.stage_number,
        slots_per_step=slots_per_step,
        rule=rule,
        weights=table.weights,
        views=config.dataset.views,
        cost=cost,
        slot_sizes=sizes,
        **order_columns(table),
    )


def _stream(
    config: RunConfig,
    inputs: OrderInputs,
    table: ClipTable | MixedTable,
    latents: FittingStore | None,
    system: System,
    peers: BucketPeers,
    world: World,
    folder: Path,
    console: Console,
) -> StepStream:
    quarantine = folder / QUARANTINE_FILE
    make: Callable[..., SlotDataset] = SlotDataset
    if latents is not None:
        windows = stored_windows(config.condition_config, inputs.rule.buckets, latents.store)
        make = partial(StoredDataset, latents.store, windows=windows)
    dataset = make(
        table,
        config.dataset,
        seed=config.seed,
        stage=config.stage_number,
        latent=system.latent,
        posterior=system.facts.posterior,
        compat=config.compat,
        quarantined=read_quarantine(quarantine),
    )

    def say(line: str) -> None:
        console.print(line, markup=False)

    loader = SlotLoader(dataset, config.num_workers, config.prefetch_factor, _host_bytes(config, world), say)
    return StepStream(inputs, loader, peers, world, quarantine, say)


def _host_bytes(config: RunConfig, world: World) -> int:
    """This rank's part of what its machine keeps for batches made ahead."""
    gb, name = config.dataset.max_host_gb, socket.gethostname()
    ranks_here = world.gather(name).count(name)
    return int((machine_bytes() / 4 if gb is None else gb * 1e9) / ranks_here)


def _trackers(config: RunConfig, folder: Path, world: World, step: int) -> Trackers:
    return Trackers.open(
        folder,
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        wandb_project=config.wandb_project,
        run_name=folder.name,
        config=config.model_dump(mode="json"),
        enabled=world.is_main,
        resume_step=step,
    )


def _announcement(
    config: RunConfig, place: RunFolder, system: System, start: Start, order: PassOrder, world: World
) -> str:
    """What is known before the first step: the model, where it starts, which clips are used, which are not and why.

    The bucket report is saved in the run's folder too.
    """
    report = order.report
    (place.path / "bucket_report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    (place.path / "bucket_report.txt").write_text(report.text() + "\n", encoding="utf-8")
    count, trained = system.num_parameters()
    size = f"{amount(count)} parameters" + (f", {amount(trained)} of them train" if trained < count else "")
    dtype = str(system.dtype).removeprefix("torch.")
    processes = f"{world.size} process" + ("es" if world.size > 1 else "")
    lines = [
        f"run folder: {place.path}",
        f"model: {size}, compute in {dtype} on {world.device.type}, {processes}",
        report.text(),
    ]
    lines[2:2] = (*system.kernels, *system.notes)
    if place.checkpoint is not None:
        lines.insert(1, f"starts from {place.checkpoint}, step {start.clock.global_step}")
    return "\n".join(lines)
