"""A training run from its command line to its last checkpoint: prepare, run, finish."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from longtake import __version__
from longtake.buckets.order import PassOrder
from longtake.checkpoint.frozen import keep_frozen
from longtake.checkpoint.runs import hold
from longtake.checkpoint.save import size_of
from longtake.checkpoint.state import Clock, Frozen, RunState
from longtake.config.dump import dump_config
from longtake.config.load import Dialect
from longtake.contracts import UserError
from longtake.data.loading.controls import control_lines
from longtake.data.tables.table import caption_lines
from longtake.diffusion.objective import Objective
from longtake.durable import write_whole
from longtake.encode.auto import store_folder
from longtake.encode.autoencoder import fit_autoencoder
from longtake.evaluate.validation import Validation, missing
from longtake.parallel.degrees import check_bucket_sequence
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World, start_world
from longtake.plan.report import amount
from longtake.system.build import System, build_system, with_low_noise
from longtake.system.caption_lengths import caption_length_lines
from longtake.system.clip_rates import clip_rate_lines
from longtake.system.pretrained import means_checkpoint
from longtake.track.devices import peak_flops
from longtake.track.meters import StepMeter
from longtake.track.progress import TrainingProgress, make_console, task_progress
from longtake.track.trackers import TrackedRun, Trackers, offline_line
from longtake.train.adapter_files import AdapterFiles, own_names
from longtake.train.choices import (
    Choices,
    settle_blocks,
)
from longtake.train.config import RunConfig
from longtake.train.custom_objective import check_resumed, describe_objective
from longtake.train.experts import ExpertDraw
from longtake.train.folder import (
    RunFolder,
    give_up,
    given_up_on_error,
    left_elsewhere,
    open_folder,
    save_config,
    started_with,
    starting_point,
    take_over_quarantine,
)
from longtake.train.health.goodput import Stopwatch
from longtake.train.health.interrupt import FirstStepTimer, StopRequest, ended_by_signals, held_signals, seconds_left
from longtake.train.health.launches import note_end, noted_launch, read_launches
from longtake.train.health.left_out import SkippedSteps
from longtake.train.health.state import Health
from longtake.train.health.watchdog import Watchdog, collective_timeout, record_collectives
from longtake.train.heldout import HeldOut
from longtake.train.inputs import (
    RunData,
    open_held_out,
    open_latents,
    open_stream,
    open_tables,
    settle_latents,
    slot_sizes_kept,
)
from longtake.train.loop import Trainer
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.record import Recorder
from longtake.train.run_file import read_run
from longtake.train.saving import Saver
from longtake.train.start import Start, lost_so_far, restore, scaling_of, step_size_lines
from longtake.train.stream import StepStream
from longtake.train.validating import Validator, is_due, plan_validations, with_encoders

_LEAST_SECONDS = 120.0  # in steps, from which on their share of the time is printed: a try is mostly its start


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    folder: Path
    checkpoint: Path | None  # the last one written
    clock: Clock
    stopped: bool  # by Ctrl-C or SIGTERM


def train_run(
    run: str,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    dialect: Dialect | None = None,
    objective: type[Objective] | None = None,
) -> Outcome:
    """`longtake train`: read RUN (a config file or the folder of an earlier run), join the processes, train.

    `objective`: in place of the config's.
    """
    resolved = read_run(run, overrides, dialect=dialect)
    config = resolved.value
    record_collectives()
    limit = collective_timeout(config.first_step_timeout, config.watchdog_seconds)
    with ended_by_signals(), start_world(config.device, limit) as world:
        return train(config, world, source=run, console=console, objective=objective)


def train(
    config: RunConfig,
    world: World,
    source: str,
    console: Console | None = None,
    objective: type[Objective] | None = None,
) -> Outcome:
    """Train one run on the processes of `world`; `source` names its config file or the folder it continues.

    `objective`: in place of the config's. An exception that is not a `UserError` passes with a note that names the last
    checkpoint.
    """
    if (elsewhere := left_elsewhere(config)) is not None:
        weights = {"from_pretrained": str(elsewhere.weights)}
        config = config.model_copy(update={"model": config.model.model_copy(update=weights)})
    console = console or make_console()
    launch = RunLaunch(config, world, source, console, objective)
    with ExitStack() as parts:
        prepared = launch.prepare(parts)
        if isinstance(prepared, Outcome):
            return prepared
        step, reports = prepared.start.state.clock.global_step, prepared.health.watchdog.folder
        launched = noted_launch(prepared.place.path, world, _device_name(world), step, reports)
        with last_checkpoint_noted(prepared.saver), launched:
            trainer = launch.run(prepared)
    return launch.finish(prepared, trainer)


@contextmanager
def last_checkpoint_noted(saver: Saver) -> Iterator[None]:
    """Add a note with the last checkpoint to exceptions of the body; those for the user, `UserError`, stay as is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        last = "none was written yet" if saver.last is None else str(saver.last)
        error.add_note(f"last checkpoint of the run: {last}")
        raise


@dataclass(frozen=True)
class Prepared:
    """A run before its first step."""

    place: RunFolder
    system: System
    updates: tuple[WeightUpdate, ...]  # of the denoisers
    data: RunData
    start: Start
    stream: StepStream
    order: PassOrder  # of the rest of the pass that it begins in
    begun: RunState
    trackers: Trackers
    saver: Saver
    health: Health
    validation: Validation | None


@dataclass
class RunLaunch:
    """One start of a run."""

    config: RunConfig
    world: World
    source: str  # its config file or the folder it continues
    console: Console
    objective: type[Objective] | None = None  # in place of the config's
    began: float = field(default_factory=time.time)

    def say(self, line: str) -> None:
        """Put a line on this rank's terminal."""
        self.console.print(line, markup=False)

    def prepare(self, parts: ExitStack) -> Prepared | Outcome:
        """Prepare everything before the first step; return an outcome where there is no step to make.

        A mistake that is found here leaves the run's folder as it was. `parts` closes what is open.
        """
        config, world, launched = self.config, self.world, self.began
        objective = world.on_all(lambda: describe_objective(self.objective, config))
        first_step = FirstStepTimer(config.first_step_timeout)
        parts.callback(first_step.done)
        mesh = Mesh.create(config.parallel, world)
        check_bucket_sequence(config.parallel, mesh.sequence)
        table, held_out = world.on_all(lambda: open_tables(config))
        validation = plan_validations(config, world)
        with ExitStack() as until_the_first_step:
            with held_signals():
                place = parts.enter_context(open_folder(config, world, self.source))
                until_the_first_step.enter_context(given_up_on_error(place, world))
            place = until_the_first_step.enter_context(starting_point(place, config, world))
            if place.checkpoint is not None and place.continues:
                world.on_main(lambda: check_resumed(place.checkpoint, objective))
            self.config = config = self.settled(place, first_step)
            mesh = replace(mesh, config=config.parallel)
            choices = self.choices(place)
            reports = place.path / world.broadcast(f"hang-{time.strftime('%y%m%d_%H%M%S')}")
            watchdog = Watchdog(config.watchdog_seconds, reports, world.rank, world.size)
            parts.callback(watchdog.close)
            first_step.report = watchdog.report
            data = RunData(table, open_latents(config, table, world), held_out)
            system = self.build(mesh, data, place, choices)
            updates = tuple(WeightUpdate(one.denoiser, config, one.prefix) for one in system.experts)
            start = self.restored(place, system, updates)
            if place.checkpoint is not None and start.finished(config) and not self.owes_validation(place, start):
                return self.nothing_to_train(place, start)
            take_over_quarantine(place, world)
            lost = world.on_main(lambda: lost_so_far(config, start.state, place))
            begun, stream = self.open_stream(system, data, start, place)
            parts.callback(stream.loader.close)
            order = stream.plan(start.state.clock.pass_index, start.state.data)
            begun = replace(begun, choices=choices.made, objective=objective)
            world.on_main(lambda: save_config(place.path, config))
            for expert in system.experts:
                if frozen := expert.frozen():
                    begun = replace(begun, **{f"{expert.prefix}frozen": self.kept_frozen(place, frozen, expert)})
            settings, step = config.model_dump(mode="json"), start.state.clock.global_step
            trackers = Trackers(TrackedRun(place.path, config, settings, step), world.is_main)
            parts.callback(trackers.close)
            if world.is_main:
                self.announce(place, system, updates[0], data, start, order)
            kept = config.keep_n_latest, config.keep_every, config.async_io
            saver = Saver(place.path, world, *kept, self.say, self.adapter_files(place))
            parts.callback(saver.close)
            if place.checkpoint is not None and place.continues:
                saver.started_from(place.checkpoint, step)
            stopwatch = Stopwatch(place.path, start.state.seconds, launched, place.restarted, enabled=world.is_main)
            skipped = SkippedSteps(config.skip_grad_norm, config.max_skipped, total=start.state.skipped_steps)
            health = Health(first_step, watchdog, stopwatch, skipped, lost)
        return Prepared(place, system, updates, data, start, stream, order, begun, trackers, saver, health, validation)

    def settled(self, place: RunFolder, first_step: FirstStepTimer) -> RunConfig:
        """Return the run with its autoencoder fitted and the source of its latents decided."""
        with first_step.paused():  # encoding takes its hours
            config = self.fitted(place)
            return settle_latents(config, started_with(place), self.world, self.say_once)

    def fitted(self, place: RunFolder) -> RunConfig:
        """Return the run with its autoencoder fitted, or with that of the run or store whose latents it goes
        on with."""
        config, earlier = self.config, []
        if config.dataset.stored:
            earlier.append(store_folder(config.dataset, config.stage_number))
        if place.checkpoint is not None and place.elsewhere is None:
            earlier.append(place.checkpoint.parent)
        if (spec := config.model.from_pretrained) is not None and means_checkpoint(spec):
            with hold(spec) as checkpoint:
                earlier.append(checkpoint.parent)
        what = config.dataset, config.bucket_rule, config.stage_number, place.path
        return fit_autoencoder(config, *what, self.world, self.say_once, earlier)

    def owes_validation(self, place: RunFolder, start: Start) -> bool:
        """Return whether an earlier launch ended before the videos of its last step were made. Collective."""
        due = is_due(self.config, start.state.clock, pass_ended=False) and place.continues
        return due and self.world.on_main(lambda: missing(place.path, start.state.clock.global_step))

    def build(self, mesh: Mesh, data: RunData, place: RunFolder, choices: Choices) -> System:
        """Return the model with its first weights (not those of a checkpoint)."""
        config, levels = settle_blocks(self.config, self.world, choices, self.say_once)
        latents, own = data.latents, place.checkpoint is not None and place.elsewhere is None
        facts_of_encoders = None if latents is None else latents.facts
        system = build_system(config, mesh, self.world, facts_of_encoders, restored=own, levels=levels)
        if self.objective is not None:
            built = self.objective(config.objective, config.model.patch[1], config.quirks)
            system = replace(system, objective=built)
        if config.low_noise is not None:
            system = with_low_noise(system, self.world, restored=own, trained=True)
        if latents is not None and system.encoders is not None:
            latents.refuse_other_weights(system.encoders, self.world)
        return system

    def restored(self, place: RunFolder, system: System, updates: Sequence[WeightUpdate]) -> Start:
        """Return the start of the run, its weights filled. Collective."""
        with task_progress(self.console, "checksums of frozen weights", self.world.is_main) as show:
            return restore(self.config, place, system, updates, show)

    def kept_frozen(self, place: RunFolder, frozen: Mapping[str, Tensor], system: System) -> Frozen:
        """Record of the frozen tensors for checkpoints; they are on the disk. Collective."""
        with task_progress(self.console, "checksums of frozen weights", self.world.is_main) as show:
            return keep_frozen(place.path, frozen, system.frozen_source, show, system.prefix)

    def open_stream(self, system: System, data: RunData, start: Start, place: RunFolder) -> tuple[RunState, StepStream]:
        """Return the stream of steps, and what every checkpoint says of the run, its frozen tensors left out."""
        config, state = self.config, start.state
        stream = open_stream(config, system, data, state, self.world, place.path, self.say)
        begun = RunState(
            clock=state.clock,
            data=state.data,
            config=dump_config(config),
            name=place.path.name,
            slots_per_step=stream.inputs.slots_per_step,
            slot_sizes=slot_sizes_kept(config, stream.inputs),
            adapters=scaling_of(system),
            versions={"longtake": __version__, "torch": torch.__version__, "python": platform.python_version()},
        )
        return begun, stream

    def choices(self, place: RunFolder) -> Choices:
        """Launch-time choices, with those saved in the run's own checkpoint: in another run's buckets another choice
        may be right."""
        own = place.checkpoint is not None and place.continues
        state = RunState.read(place.checkpoint) if own else RunState(Clock())
        return Choices(self.world, state.choices, self.say_once)

    def say_once(self, line: str) -> None:
        """Put a line on rank 0's terminal."""
        if self.world.is_main:
            self.say(line)

    def announce(
        self, place: RunFolder, system: System, update: WeightUpdate, data: RunData, start: Start, order: PassOrder
    ) -> None:
        """Log on rank 0 the facts known before the first step: the model, where it starts, which clips are used, which
        are not and why. The bucket report is saved in the run's folder too."""
        report, world = order.report, self.world
        write_whole(place.path / "bucket_report.json", json.dumps(report.to_json(), indent=1) + "\n", synced=False)
        write_whole(place.path / "bucket_report.txt", report.text() + "\n", synced=False)
        count, trained = system.num_parameters()
        size = f"{amount(count)} parameters" + (f", {amount(trained)} of them train" if trained < count else "")
        dtype, processes = str(system.dtype).removeprefix("torch."), f"{world.size} process{'es' * (world.size > 1)}"
        lines = [f"run folder: {place.path}"]
        if place.checkpoint is not None:
            lines += [f"starts from {place.checkpoint}, step {start.state.clock.global_step}", *start.notes]
        lines.append(f"model: {size}, compute in {dtype} on {world.device.type}, {processes}")
        lines += step_size_lines(self.config, start.state, system.mesh.data_ranks)
        lines += [*system.kernels, *(note for one in system.experts for note in one.notes)]
        if self.config.low_noise is not None:
            share = ExpertDraw.of_run(self.config, system).share
            lines.append(f"two denoisers: {share:.1%} of steps train the one for low noise")
        lines.append(report.text())
        if len(groups := update.optimizer.groups) > 1:
            lines += map(str, groups)
        if (last := _total_steps(self.config, start, order)) < (wanted := self.config.max_steps or 0):
            passes = f"epochs = {self.config.epochs}: passes end about step {last}"
            lines.append(f"{passes}, before max_steps = {wanted}; a larger --epochs goes on")
        lines.append(caption_lines(data.tables, self.config.dataset.captions))
        lines += clip_rate_lines(self.config, self.config.bucket_rule, data.table)
        if data.latents is None:
            lines += control_lines(data.table, self.config.sample_rules.companions)
        lines += caption_length_lines(self.config, data.table, system.encoders and system.encoders.counts)
        if data.latents is not None:
            lines.append(str(data.latents))
        self.say("\n".join(lines))

    def adapter_files(self, place: RunFolder) -> AdapterFiles | None:
        """Return the files of adapters that this run writes beside its folder; None where it writes none.
        Collective."""
        wanted, folder = self.config.lora_files, place.path.parent
        if not wanted:
            return None
        names = self.world.on_main(lambda: own_names(wanted, place.path))
        if self.world.is_main and names != wanted:
            first = str(folder / next(iter(names.values()))).replace("{step}", "N")
            self.say(f"files of adapters: {first}, since {folder} holds those of another run")
        return AdapterFiles.of_run(self.config, folder, names)

    def nothing_to_train(self, place: RunFolder, start: Start) -> Outcome:
        """Return the end of a launch that finds its last step made: one line, and every file as it was."""
        give_up(place, self.world)
        clock = start.state.clock
        if self.world.is_main:
            self.say(
                f"max_steps = {self.config.max_steps}: the run is at step {clock.global_step} already; "
                "nothing to train; a larger --max-steps goes on"
            )
        return Outcome(place.checkpoint.parent, place.checkpoint, clock, stopped=False)

    def run(self, prepared: Prepared) -> Trainer:
        """All steps, to the last checkpoint."""
        config, world, system, updates = self.config, self.world, prepared.system, prepared.updates
        step = prepared.start.state.clock.global_step
        left = seconds_left(config.time_limit, time.time() - self.began)
        launch = len(read_launches(prepared.place.path))
        with (
            StopRequest(world.is_main, left, prepared.place.path, launch) as stop,
            TrainingProgress(
                _total_steps(config, prepared.start, prepared.order),
                step,
                console=self.console,
                every=config.log_every,
                enabled=world.is_main,
            ) as progress,
        ):
            meter, table = StepMeter(_peak(config, world), world.size), prepared.data.table
            seen = prepared.trackers, progress, meter
            recorder = Recorder(system, table, world, *seen, config.log_every, prepared.health, prepared.saver)
            validator = self.validator(prepared, recorder, stop)
            parts = config, system, updates, prepared.stream, recorder, prepared.saver, stop, prepared.begun
            trainer = Trainer(*parts, validator)
            prepared.saver.look_for_room(sum(size_of(update.tensors()) for update in updates))
            trainer.run(prepared.order, prepared.start.skip)
        return trainer

    def validator(self, prepared: Prepared, recorder: Recorder, stop: StopRequest) -> Validator | None:
        """Create the validator of the run; None where it has none. Collective."""
        if prepared.validation is None:
            return None
        config, place, world = self.config, prepared.place, self.world
        system, peers, held_out = with_encoders(prepared.system, config, world), prepared.stream.peers, None
        if config.validation.holds_out:
            clips = open_held_out(config, system, prepared.data, peers, world, place.path, self.say)
            held_out = HeldOut(config, system, clips, clips.plan(0, None), world)
        parts = system, prepared.updates, peers, place.path, world, recorder, stop, self.say, held_out
        validator = Validator(prepared.validation, config, *parts)
        validator.begin(prepared.start.state.clock.global_step, place.continues)
        return validator

    def finish(self, prepared: Prepared, trainer: Trainer) -> Outcome:
        """Return the last words on rank 0, when all is closed."""
        place, last, stopwatch = prepared.place.path, prepared.saver.last, prepared.health.stopwatch
        if self.world.is_main:
            note_end(place, trainer.stopped)
            stopwatch.write()
            if stopwatch.seconds.steps >= _LEAST_SECONDS:
                self.say(str(stopwatch.seconds))
            ended = "stopped" if trainer.stopped else "done"
            self.say(f"{ended} at step {trainer.clock.global_step}; checkpoint: {last}")
            if self.config.wandb and (line := offline_line(place)):
                self.say(line)
            run = shlex.quote(str(place))
            self.say(
                f"to go on: longtake train {run}"
                if trainer.stopped
                else f"to make a video: longtake generate {run} --prompt 'what the video shows'"
            )
        return Outcome(place, last, trainer.clock, trainer.stopped)


def _total_steps(config: RunConfig, start: Start, order: PassOrder) -> int:
    """Return the step the run ends at; later passes are taken to be as long as this one."""
    clock = start.state.clock
    passes = config.epochs - clock.pass_index
    left = order.num_steps - start.skip + (passes - 1) * order.report.num_steps if passes > 0 else 0
    last = clock.global_step + left
    return last if config.max_steps is None else min(last, config.max_steps)


def _peak(config: RunConfig, world: World) -> float | None:
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    return peak_flops(_device_name(world)) if world.device.type == "cuda" else None


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
