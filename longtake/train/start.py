"""Start of a run: at step zero, or at the step of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

from torch import Tensor

from longtake.checkpoint.frozen import restore_frozen
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import UserError
from longtake.data.loading.quarantine import read_quarantine
from longtake.parallel.shard import local_tensor, own_part
from longtake.system.build import System
from longtake.train.config import RunConfig
from longtake.train.folder import QUARANTINE_FILE, RunFolder
from longtake.train.health.left_out import LostSamples
from longtake.train.optimizer.update import WeightUpdate
from longtake.weights.model import ModelWeights
from longtake.weights.training_folder import TrainingFolder


@dataclass(frozen=True)
class Start:
    """The first moment of a launch."""

    state: RunState  # of the checkpoint; clock and position may be moved
    skip: int = 0  # steps of the pass to leave out
    notes: tuple[str, ...] = ()  # what the user should know of the checkpoint, one line each

    def finished(self, config: RunConfig) -> bool:
        """Return whether the run has made all its steps."""
        return config.max_steps is not None and self.state.clock.global_step >= config.max_steps


def restore(
    config: RunConfig,
    place: RunFolder,
    system: System,
    updates: Sequence[WeightUpdate],
    on_digest: Callable[[float], None] = lambda share: None,
) -> Start:
    """Fill weights, EMA and optimizer of each denoiser from the checkpoint the run starts from, and read its state.

    `start_epoch` and `start_step` move the data position only, to the start of a pass (`start_step` alone: the current
    one); the optimizer and the step counter continue. `on_digest` gets the share of frozen tensors that is compared.
    """
    if place.checkpoint is None:
        return _moved(config, RunState(Clock()))
    if place.elsewhere is not None:
        return _take_over(config, place.elsewhere, system, updates[0])
    state = RunState.read(place.checkpoint)
    _refuse_other_scaling(place.checkpoint, state.adapters, scaling_of(system))
    made = state.clock.global_step - state.skipped_steps
    for expert, update in zip(system.experts, updates, strict=True):
        load_tensors(place.checkpoint, update.weights(), checked=place.continues)
        facts = state.frozen_of(expert.prefix)
        restore_frozen(place.checkpoint, expert.frozen(), facts, on_digest, expert.prefix)
        own = state.low_noise_updates if expert.prefix else made - state.low_noise_updates
        update.optimizer.set_updates(own)
        averages = update.averages()
        if averages and not load_tensors(place.checkpoint, averages, strict=False, checked=True).filled:
            update.ema.restart()  # the checkpoint kept none: it begins at the loaded weights
    if not place.continues:
        state = replace(state, seconds={})
    return Start(state) if place.restarted and place.continues else _moved(config, state)


def scaling_of(system: System) -> dict[str, float]:
    """Return alpha / rank of every layer with an adapter, by its name, that of a second denoiser with its prefix."""
    return {one.prefix + name: by for one in system.experts for name, by in one.adapter_scaling().items()}


def _take_over(config: RunConfig, folder: TrainingFolder, system: System, update: WeightUpdate) -> Start:
    """Yield the same from a checkpoint of another program, whose weights the system has: average, moments, counts.
    Its own order of data is not known; as many steps of the pass are left out as it has made micro-batches for."""
    optimizer, counts = update.optimizer, [0]

    def moments() -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for name, count, both in folder.moments(optimizer.parameters.keys()):
            counts.append(count)
            yield name, both

    optimizer.take_moments(moments())
    optimizer.set_updates(max(counts))
    notes = []
    if (ema := update.ema) is not None and folder.averages is not None:
        averages, state = ModelWeights(folder.averages, config.model, config.family.weight_format), ema.state()
        for name in ema.parameters.keys() & averages.keys():
            own = state[f"ema.{name}"]
            local_tensor(own).copy_(own_part(averages[name], own))
    elif ema is not None:
        ema.restart()
        notes.append(f"{folder.path}: has no averages; they begin at its weights")
    elif folder.averages is not None:
        notes.append(f"ema_decay = None: {folder.averages.name} is left out")
    done, named = folder.micro_batches, folder.place["global_step"]
    skip = folder.place["step"] if done is None else done // config.slots_at(system.mesh.data_ranks)
    if named != max(counts):
        notes.append(f"its step {named:,} is its optimizer's {max(counts):,}, by which rates go; that is counted on")
    start = _moved(config, RunState(Clock(global_step=max(counts), pass_index=folder.place["epoch"])))
    if config.start_epoch is None and config.start_step is None:
        notes.append(
            "its order of clips and its random numbers are not those of this run: pass "
            f"{folder.place['epoch']} goes on behind {skip:,} steps of this run's own order"
        )
        start = replace(start, skip=skip)
    return replace(start, notes=tuple(notes))


def _refuse_other_scaling(checkpoint: Path, saved: Mapping[str, float], here: Mapping[str, float]) -> None:
    """Raise `UserError` where adapters would have another weight in the model than the one they were trained at."""
    changed = [layer for layer in here if layer in saved and not isclose(saved[layer], here[layer])]
    if changed:
        raise UserError(
            f"lora.rank, lora.alpha, lora.rslora: the adapters in {checkpoint} were trained at the scale "
            f"{saved[changed[0]]:g} ({changed[0]}), the run has {here[changed[0]]:g}; leave these keys as they were"
        )


def _moved(config: RunConfig, state: RunState) -> Start:
    if config.start_epoch is None and config.start_step is None:
        return Start(state)
    if config.start_epoch is not None and config.start_epoch >= config.epochs:
        raise UserError(
            f"start_epoch = {config.start_epoch}: passes count from 0, so epochs = {config.epochs} leaves none to "
            f"train; choose at most {config.epochs - 1}, or raise epochs"
        )
    pass_index = state.clock.pass_index if config.start_epoch is None else config.start_epoch
    return Start(replace(state, clock=replace(state.clock, pass_index=pass_index), data=None), config.start_step or 0)


def step_size_lines(config: RunConfig, state: RunState, data_ranks: int) -> list[str]:
    """One line where steps are not as large as `accumulation_steps` on so many ranks would make them, or leave ranks
    without work."""
    slots = config.slots_per_step or state.slots_per_step or config.slots_at(data_ranks)
    usual = data_ranks * config.accumulation_steps
    idle = -slots % data_ranks
    inherited = config.slots_per_step is None and slots != usual
    if not (inherited or idle):
        return []
    line = f"slots_per_step = {slots}" + (", from the checkpoint" if inherited else "")
    if idle:
        line += f": in the last round of each step {idle} of {data_ranks} data ranks compute padding only"
    if inherited:
        ranks = f"{data_ranks} data rank{'s' * (data_ranks > 1)}"
        remedy = f"--slots-per-step {usual} makes steps of {ranks} x accumulation_steps = {config.accumulation_steps}"
    else:
        remedy = f"--slots-per-step {slots + idle} uses all of them"
    return [f"{line}; {remedy}"]


def lost_so_far(config: RunConfig, state: RunState, place: RunFolder) -> LostSamples:
    """Return the samples tried and lost up to the checkpoint. Raises `UserError` where they are too many already."""
    quarantine = place.path / QUARANTINE_FILE
    lost = LostSamples.going_on(state.samples, len(read_quarantine(quarantine)))
    if lost.too_many(config.dataset):
        raise lost.refusal(config.dataset, quarantine)
    return lost
