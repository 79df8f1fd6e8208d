"""A run file with stages, from its command line to the last checkpoint of its last stage."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from longtake import locks
from longtake.config.load import Dialect
from longtake.contracts import EXIT_INTERRUPTED, UserError
from longtake.durable import write_whole
from longtake.parallel.config import AXES, ParallelConfig, resolve_degrees
from longtake.parallel.world import World, start_world
from longtake.small_files import check_kinds, read_object
from longtake.system.tiny import TINY
from longtake.track.progress import make_console
from longtake.train.config import RunConfig
from longtake.train.folder import LOCK_FILE
from longtake.train.health.watchdog import collective_timeout, record_collectives
from longtake.train.run import Outcome, train, train_run
from longtake.train.run_file import STAGE, CommandLine, Curriculum, Stage, read_curriculum

EXIT_OTHER_WORLD = 78  # the next stage needs another number of processes; its launch line has been printed
STAGES_FILE = "stages.json"  # stage -> its last checkpoint, of those that are done
_MEND = "mend it, or remove it to have all stages looked at"
_NOT_FOR_ALL = ("load", "resume", "start_epoch", "start_step")  # of a single run: the stage they mean is unclear


def train_all(
    run: str, overrides: Sequence[str] = (), console: Console | None = None, dialect: Dialect | None = None
) -> int:
    """`longtake train`: trains RUN, or the stages of it that are not done. Returns the exit status.

    0: done. `EXIT_INTERRUPTED`: stopped with a checkpoint. `EXIT_OTHER_WORLD`: the next stage does not fit these
    processes. The same command resumes where the last launch stopped, if RUN has stages. `dialect`: that of RUN
    and `overrides`, where they are not in Longtake's own terms.
    """
    curriculum = read_curriculum(run, dialect)
    if curriculum is None:
        return _status(train_run(run, overrides, console, dialect))
    command = CommandLine.read(overrides, dialect)
    chosen = curriculum.stages if command.stage is None else (curriculum.stage(command.stage),)
    configs = {stage.name: _placed(curriculum, stage, command) for stage in curriculum.stages}
    first = configs[chosen[0].name]
    record_collectives()
    with start_world(first.device, collective_timeout(first.first_step_timeout, first.watchdog_seconds)) as world:
        launch = CurriculumLaunch(curriculum, configs, command, world, console or make_console())
        for stage in chosen:
            if status := launch.train(stage):
                return status
            world.free_memory()  # for the model of the next stage
    return 0


def _placed(curriculum: Curriculum, stage: Stage, command: CommandLine) -> RunConfig:
    """Return the config of a stage, with its folder in that of the curriculum. Raises `ConfigError` and `UserError`."""
    config = curriculum.resolve(stage, command, RunConfig).value
    for key in _NOT_FOR_ALL:
        if (value := getattr(config, key)) is not None:
            raise UserError(f"{key} = {value!r}: each stage starts from the one before; leave {key} out")
    place = {"outputs": str(Path(config.outputs) / config.exp_name), "exp_name": stage.name}
    return config.model_copy(update={**place, "resume": "auto"})


@dataclass(frozen=True)
class CurriculumLaunch:
    """One launch of a curriculum."""

    curriculum: Curriculum
    configs: Mapping[str, RunConfig]  # by the name of the stage
    command: CommandLine
    world: World
    console: Console

    def train(self, stage: Stage) -> int:
        """Train one stage, if it is not done. Returns 0 or the status to end with. Collective."""
        config = self.configs[stage.name]
        done = self.world.on_main(lambda: read_done(Path(config.outputs)))
        if stage.name in done:
            self._say(f"stage {stage.name}: done, {done[stage.name]}")
            return 0
        try:
            resolve_degrees(config.parallel, self.world.size)
        except UserError as misfit:
            self._say(f"stage {stage.name}: {misfit}\nto go on: {self._launch_line(config.parallel)}")
            return EXIT_OTHER_WORLD
        config = self._with_weights(stage, config, done)
        self._say(f"stage {stage.name}, {stage.number + 1} of {len(self.curriculum.stages)}")
        outcome = train(config, self.world, source=str(self.curriculum.path), console=self.console)
        if outcome.stopped or outcome.checkpoint is None:
            return _status(outcome)
        last = str(outcome.checkpoint.relative_to(config.outputs))
        self.world.on_main(lambda: note_done(Path(config.outputs), stage.name, last))
        return 0

    def _with_weights(self, stage: Stage, config: RunConfig, done: Mapping[str, str]) -> RunConfig:
        """Return the config with the weights that the stage starts from: its own, else those of the stage before.

        `--model.from_pretrained` is for the first stage, and for the one that `--stage` names. Adapters of the stage
        before are trained further in one with the same `lora`, even if that names a file: the first stage loaded it.
        """
        own = config.model.from_pretrained
        if stage.number == 0 or stage.names_weights or (self.command.stage is not None and own is not None):
            return config
        before = self.curriculum.stages[stage.number - 1].name
        if before not in done:
            raise UserError(
                f"{STAGE} {stage.name}: starts from stage {before}, which is not done in {config.outputs}; run that "
                "one first, or give --model.from_pretrained"
            )
        weights = {"from_pretrained": str(Path(config.outputs) / done[before])}
        changes = {"model": config.model.model_copy(update=weights)}
        if config.low_noise is not None:
            changes["low_noise"] = config.low_noise.model_copy(update=weights)
        if config.lora is not None and config.lora == self.configs[before].lora:
            changes["lora"] = config.lora.model_copy(update={"from_pretrained": None})
        return config.model_copy(update=changes)

    def _launch_line(self, parallel: ParallelConfig) -> str:
        """Return the command that starts the stage on a number of processes that fits, as near to this one as
        may be."""
        degrees = {axis: getattr(parallel, axis) for axis in AXES}
        product = math.prod(degree for degree in degrees.values() if degree != "auto")
        size = product if "auto" not in degrees.values() else max(1, self.world.size // product) * product
        node = self.world.node_size
        nodes = size // node if size % node == 0 and self.world.size > node else 1
        words = list(self.command.overrides)
        words += [TINY] * self.command.tiny + ([STAGE, self.command.stage] if self.command.stage else [])
        spread = [f"--nnodes {nodes}"] * (nodes > 1) + [f"--nproc_per_node {size // nodes}"]
        return " ".join(["torchrun", *spread, "-m longtake train", shlex.join([str(self.curriculum.path), *words])])

    def _say(self, line: str) -> None:
        if self.world.is_main:
            self.console.print(line, markup=False, soft_wrap=True)


def read_done(folder: Path) -> dict[str, str]:
    """Stage -> its last checkpoint, in `folder`, of the stages that are done. Raises `UserError`."""
    path = folder / STAGES_FILE
    try:
        found = read_object(path, {}, _MEND)
    except FileNotFoundError:
        return {}
    check_kinds(path, found, dict.fromkeys(found, str), _MEND)
    return found


def note_done(folder: Path, stage: str, checkpoint: str) -> None:
    """Add a stage to those that are done; launches of other stages may do so at the same time."""
    with (folder / LOCK_FILE).open("a") as lock:
        with suppress(OSError):  # a file system without locks
            locks.flock(lock, locks.LOCK_EX)
        done = read_done(folder) | {stage: checkpoint}
        write_whole(folder / STAGES_FILE, json.dumps(done, indent=1) + "\n")


def _status(outcome: Outcome) -> int:
    return EXIT_INTERRUPTED if outcome.stopped else 0
