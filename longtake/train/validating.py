"""Validations in the course of a run: when one is due, from which weights, and where its videos and losses go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longtake.checkpoint.state import Clock
from longtake.evaluate.config import LOSSES_FILE
from longtake.evaluate.validation import FOLDER, Validation, forget_after, missing, plan_validation
from longtake.generate.requests import Video
from longtake.generate.run import NotFiniteVideo, read_video
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.offloaded_weights import OffloadedTensors, OffloadedWeights, offloaded
from longtake.parallel.shard import gather_anew
from longtake.parallel.world import World
from longtake.plan.validation import validation_rooms
from longtake.plan.work import read_layout
from longtake.system.build import System
from longtake.system.encoders import build_encoders, encoders_on_host, find_encoders
from longtake.system.room import free_bytes, has_room
from longtake.track.trackers import TrackedVideo, append_line
from longtake.train.config import RunConfig
from longtake.train.health.interrupt import StopRequest
from longtake.train.heldout import HeldOut, curves
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.record import Recorder


def plan_validations(config: RunConfig, world: World) -> Validation | None:
    """Return the plan of the run's validations; None where it has none. Raises `UserError`, on every rank, for prompts
    and references that cannot be used. Collective."""
    section = config.validation
    if section is None:
        return None
    if config.dataset.latents is not None and needs_encoders(config):  # else the run looks for them anyway
        world.on_all(lambda: find_encoders(config))
    return world.on_all(lambda: plan_validation(config, section))


def needs_encoders(config: RunConfig) -> bool:
    """Return whether validations encode and decode, also of a run that trains from stored latents."""
    section = config.validation
    return section is not None and bool(section.prompts or section.data_path)


def with_encoders(system: System, config: RunConfig, world: World) -> System:
    """Return a system that can make videos: one that trains from stored latents gets encoders, in the host's memory
    between their uses. Collective."""
    if system.encoders is not None or not needs_encoders(config):
        return system
    encoders = build_encoders(encoders_on_host(config), world.device, world)
    if (cut := system.cut) is not None:
        encoders.share(lambda: cut.peers.everyone)
    second = None if system.low_noise is None else replace(system.low_noise, encoders=encoders)
    return replace(system, encoders=encoders, low_noise=second)


def is_due(config: RunConfig, clock: Clock, pass_ended: bool) -> bool:
    """Return whether a validation is due at this step."""
    steps, passes = config.validate_every, config.validate_every_passes
    by_pass = bool(passes) and pass_ended and clock.pass_index % passes == 0
    if clock.global_step == 0:
        return bool(steps or passes)
    return (bool(steps) and clock.global_step % steps == 0) or by_pass


@dataclass
class Validator:
    """Makes the validations of one launch, each step's once: what an earlier launch made of this moment stays, what it
    made of later ones is forgotten."""

    validation: Validation
    config: RunConfig
    system: System  # with encoders
    updates: Sequence[WeightUpdate]  # of the system's denoisers
    peers: BucketPeers
    folder: Path
    world: World
    recorder: Recorder
    stop: StopRequest
    say: Callable[[str], None]  # puts a line on rank 0's terminal
    held_out: HeldOut | None = None
    _needed: int | None = None  # bytes that its videos take beside what the run holds
    done: int | None = None  # the last step of which it is made, or need not be

    def begin(self, step: int, continues: bool) -> None:
        """Begin the launch at this step; `continues`: in the folder of an earlier one. Collective."""
        if not continues:
            self.done = step or None
            return
        self.world.on_main(lambda: forget_after(self.folder, step))
        self.done = None if self.world.on_main(lambda: missing(self.folder, step)) else step

    def make_due(self, clock: Clock, pass_ended: bool, now: bool = False) -> bool:
        """Make the validation of this moment where one is due, or asked for `now`; return whether the run is to stop,
        which leaves it to the next launch. Collective."""
        if self.done == clock.global_step or not (now or is_due(self.config, clock, pass_ended)):
            return False
        health, step = self.recorder.health, clock.global_step
        if self.recorder.flush():
            return True
        with self.recorder.paused(), health.stopwatch.validating():
            if not self._make(step):
                return True
        self.done = step
        return False

    def _make(self, step: int) -> bool:
        """Make the whole validation; return False where a stop was requested meanwhile."""
        health, kept = self.recorder.health, [one.ema for one in self.updates if one.ema is not None]
        emas = kept if self.validation.ema else []
        both = bool(emas) and self.validation.ema == "both"

        def watched(name: str) -> Callable[[float], None]:
            show = self.recorder.progress.task(name)

            def watch(share: float) -> None:
                health.first_step.done()
                health.watchdog.beat(step)
                show(share)

            return watch

        def losses() -> dict[str, Any] | None:
            if self.held_out is None:
                return {}
            return self.held_out.losses(watched("held-out loss"), lambda: self.stop.asked)

        self.world.free_memory()
        make_room, device = self._makes_room(), self.system.device
        averages = [tensor for ema in kept for tensor in ema.storage.on_device]
        with ExitStack() as away:
            if make_room:
                moments = [tensor for one in self.updates for tensor in one.optimizer.storage.on_device]
                away.enter_context(offloaded(OffloadedTensors(moments, device)))
            found = {"raw": losses() if both else {}}
            for ema in emas:
                away.enter_context(ema.in_place())
            for one in self.system.experts:
                gather_anew(one.denoiser)  # with parallel.zero = 2 those of the raw weights' forwards are kept
            found["ema" if emas else "raw"] = losses()
            self.peers.use(self.system.mesh.sequence)
            system = self.system
            if make_room:
                away.enter_context(offloaded(OffloadedTensors(averages, device)))
                held = []
                for one in self.system.experts:
                    weights = away.enter_context(offloaded(OffloadedWeights(one.denoiser, device)))
                    held.append(replace(one, offloaded_weights=weights))
                system = replace(held[0], low_noise=held[1] if len(held) > 1 else None)
            watch = watched("validation videos")
            try:
                videos = self.validation.make(system, self.folder, step, self.world, watch, lambda: self.stop.asked)
            except NotFiniteVideo as fault:  # whether training can go on is the loss's to say
                videos = []
                if self.world.is_main:
                    self.say(f"validation: {fault}")
            for one in self.system.experts:
                gather_anew(one.denoiser)
        self.world.free_memory()
        if videos is None or None in found.values():
            return False
        if self.world.is_main:
            self._note(step, {weights: of for weights, of in found.items() if of})
            self.recorder.trackers.show(step, [self._tracked(video) for video in videos])
        return True

    def _makes_room(self) -> bool:
        """Return whether tensors that no forward needs are to be offloaded to CPU; the same answer on every rank.
        Collective."""
        wanted, device = self.validation.offload, self.system.device
        if wanted != "auto" or device.type != "cuda" or not self.validation.prompts:
            return wanted is True and bool(self.validation.prompts)
        if self._needed is None:
            layout = read_layout(self.config, self.world.size, self.world.node_size)
            self._needed = max(max(validation_rooms(self.config, one, layout)) for one in self.validation.requests())
        lacking = any(self.world.gather(not has_room(device, self._needed)))
        if lacking and self.world.is_main:
            needed, free = (f"{count / 2**30:.3g} GiB" for count in (self._needed, free_bytes(device)))
            self.say(f"validation: moments and average wait in host memory; videos take {needed}, {free} are free")
        return lacking

    def _note(self, step: int, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Write down the held-out losses by the weights they are of."""
        for weights, of in found.items():
            append_line(self.folder / LOSSES_FILE, {"step": step, "weights": weights, **of})
            prefix = "validation/raw/" if weights == "raw" and len(found) > 1 else "validation/"
            self.recorder.trackers.log(step, dict(curves(of, prefix)))

    def _tracked(self, video: Video) -> TrackedVideo:
        frames, rate = read_video(video.path), self.validation.config.fps_save
        return TrackedVideo(f"{FOLDER}/{video.prompt.name}", video.prompt.text, video.path, frames, rate)
