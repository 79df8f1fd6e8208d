"""Where a run begins: at zero, or at the moment of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

from longtake.checkpoint import Clock, RunState, load_tensors, restore_frozen
from longtake.contracts import UserError
from longtake.data import read_quarantine
from longtake.system import System
from longtake.train.config import RunConfig
from longtake.train.folder import QUARANTINE_FILE, RunFolder
from longtake.train.health import LostSamples
from longtake.train.optimizer import WeightUpdate


@dataclass(frozen=True)
class Start:
    """The first moment of a launch."""

    state: RunState  # of the checkpoint; clock and position may be moved
    skip: int = 0  # steps of the pass to leave out

    def finished(self, config: RunConfig) -> bool:
        """Whether the run has made all its steps."""
        return config.max_steps is not None and self.state.clock.global_step >= config.max_steps


def restore(config: RunConfig, place: RunFolder, system: System, update: WeightUpdate) -> Start:
    """Fills weights, EMA and optimizer from the checkpoint the run starts from, and reads its state.

    `start_epoch` and `start_step` move the data position only, to the start of a pass (`start_step` alone: the current
    one); the optimizer and the step counter continue.
    """
    if place.checkpoint is None:
        return _moved(config, RunState(Clock()))
    state = RunState.read(place.checkpoint)
    _refuse_other_scaling(place.checkpoint, state.adapters, system.adapter_scaling())
    load_tensors(place.checkpoint, update.weights(), checked=place.continues)
    restore_frozen(place.checkpoint, system.frozen(), state.frozen)
    update.optimizer.set_updates(state.clock.global_step - state.skipped_steps)
    ema = update.ema
    if ema is not None and not load_tensors(place.checkpoint, ema.state(), strict=False, checked=True).filled:
        ema.restart()  # the checkpoint kept none: it begins at the loaded weights
    if not place.continues:
        state = replace(state, seconds={})
    return Start(state) if place.restarted and place.continues else _moved(config, state)


def _refuse_other_scaling(checkpoint: Path, saved: Mapping[str, float], here: Mapping[str, float]) -> None:
    """Raises `UserError` where adapters would have another weight in the model than the one they were trained at."""
    changed = [layer for layer in here if layer in saved and not isclose(saved[layer], here[layer])]
    if changed:
        raise UserError(
            f"lora.rank, lora.alpha: the adapters in {checkpoint} were trained with alpha / rank = "
            f"{saved[changed[0]]:g} ({changed[0]}), the run has {here[changed[0]]:g}; leave both as they were"
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


def lost_so_far(config: RunConfig, state: RunState, place: RunFolder) -> LostSamples:
    """The samples tried and lost up to the checkpoint. Raises `UserError` where they are too many already."""
    quarantine = place.path / QUARANTINE_FILE
    lost = LostSamples.going_on(state.samples, len(read_quarantine(quarantine)))
    if lost.too_many(config.dataset):
        raise lost.refusal(config.dataset, quarantine)
    return lost
