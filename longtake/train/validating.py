"""Validations in the course of a run: when one is due, from which weights, and where its videos go."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from longtake.checkpoint import Clock
from longtake.evaluate import FOLDER, Validation, forget_after, missing, plan_validation
from longtake.generate import Video, read_video
from longtake.parallel import BucketPeers, World, gather_anew
from longtake.system import System, build_encoders, encoders_on_host, find_encoders
from longtake.track import TrackedVideo
from longtake.train.config import RunConfig
from longtake.train.health import StopRequest
from longtake.train.optimizer import WeightUpdate
from longtake.train.record import Recorder


def plan_validations(config: RunConfig, world: World) -> Validation | None:
    """What the run's validations make; None where it has none. Raises `UserError`, on every rank, for prompts and
    references that cannot be used. Collective."""
    section = config.validation
    if section is None:
        return None
    if config.dataset.latents is not None:  # else the run looks for them anyway
        world.on_all(lambda: find_encoders(config))
    return world.on_all(lambda: plan_validation(config, section))


def with_encoders(system: System, config: RunConfig, world: World) -> System:
    """A system that can make videos: one that trains from stored latents gets encoders, in the host's memory between
    their uses. Collective."""
    if system.encoders is not None:
        return system
    encoders = build_encoders(encoders_on_host(config), world.device, world)
    if (cut := system.cut) is not None:
        encoders.share(lambda: cut.peers.everyone)
    return replace(system, encoders=encoders)


def is_due(config: RunConfig, clock: Clock, pass_ended: bool) -> bool:
    """Whether a validation belongs to this moment."""
    steps, passes = config.validate_every, config.validate_every_passes
    by_pass = bool(passes) and pass_ended and clock.pass_index % passes == 0
    return clock.global_step > 0 and ((bool(steps) and clock.global_step % steps == 0) or by_pass)


@dataclass
class Validator:
    """Makes the validations of one launch, each step's once: what an earlier launch made of this moment stays, what it
    made of later ones is forgotten."""

    validation: Validation
    config: RunConfig
    system: System  # with encoders
    update: WeightUpdate
    peers: BucketPeers
    folder: Path
    world: World
    recorder: Recorder
    stop: StopRequest
    done: int | None = None  # the last step of which it is made, or need not be

    def begin(self, step: int, continues: bool) -> None:
        """The launch begins at this step; `continues`: in the folder of an earlier one. Collective."""
        if not continues:
            self.done = step
            return
        self.world.on_main(lambda: forget_after(self.folder, step))
        self.done = None if self.world.on_main(lambda: missing(self.folder, step)) else step

    def make_due(self, clock: Clock, pass_ended: bool) -> bool:
        """Makes the validation of this moment where one is due; returns whether the run is to stop, which leaves it to
        the next launch. Collective."""
        if self.done == clock.global_step or not is_due(self.config, clock, pass_ended):
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
        """Whether all videos are made; False where a stop was asked for meanwhile."""
        health, ema = self.recorder.health, self.update.ema if self.validation.ema else None
        self.peers.use(self.system.mesh.sequence)

        def watch(share: float) -> None:
            health.first_step.done()
            health.watchdog.beat(step)

        with ema.in_place() if ema is not None else nullcontext():
            videos = self.validation.make(self.system, self.folder, step, self.world, watch, lambda: self.stop.asked)
            gather_anew(self.system.denoiser)
        self.world.free_memory()
        if videos is not None and self.world.is_main:
            self.recorder.trackers.show(step, [self._tracked(video) for video in videos])
        return videos is not None

    def _tracked(self, video: Video) -> TrackedVideo:
        frames, rate = read_video(video.path), self.validation.config.fps_save
        return TrackedVideo(f"{FOLDER}/{video.prompt.name}", video.prompt.text, video.path, frames, rate)
