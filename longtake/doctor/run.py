"""The examination of a run or of a config: its checks in order, with the system as the run would build it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.folder import is_complete
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.state import RunState
from longtake.config.load import Dialect
from longtake.contracts import UserError
from longtake.doctor import data, machine, model, training
from longtake.doctor.case import Case, open_case
from longtake.doctor.finding import Finding, ranked
from longtake.encode.autoencoder import fit_autoencoder
from longtake.generate.source import load_weights
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World, start_world
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run

Found = Callable[[Finding | None], None]


@dataclass(frozen=True)
class Examination:
    """What was found, in the order of the checks."""

    run: str
    checkpoint: Path | None
    findings: tuple[Finding, ...]

    @property
    def causes(self) -> list[Finding]:
        """What is not ok, the likeliest cause first; none: a clean bill."""
        return ranked(self.findings)

    def to_json(self) -> dict[str, Any]:
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        found = [vars(one) for one in self.findings]
        causes = [one.cause for one in self.causes]
        return {"run": self.run, "checkpoint": checkpoint, "clean": not causes, "causes": causes, "findings": found}


def examine(
    run: str,
    overrides: Sequence[str] = (),
    *,
    clips: int = 16,
    quick: bool = False,
    ema: bool = True,
    dialect: Dialect | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Examination:
    """Examine RUN: a config file, the folder of a run, whose last checkpoint is taken, or a checkpoint. `clips`: how
    many are looked at; with fewer, faults are missed and found where there are none. `quick`: no clip is trained on.
    `ema`: the averaged weights, where there are any. `on_progress` gets the share of the checks that is done.

    Raises `UserError` for what cannot be read or built.
    """
    folder, checkpoint = _place(run)
    config = alone(read_run(str(folder or run), overrides, dialect=dialect).value)
    findings: list[Finding] = []
    expected = 14 + (not quick) + 4 * (checkpoint is not None)

    def progress(share: float) -> None:
        on_progress(min(1.0, (len(findings) + share) / expected))

    def found(finding: Finding | None) -> None:
        if finding is not None:
            findings.append(finding)
            progress(0.0)

    try:
        with start_world(config.device) as world, tempfile.TemporaryDirectory() as scratch:
            _examine(config, world, folder, checkpoint, clips, quick, ema, Path(scratch), found, progress)
    except torch.OutOfMemoryError:
        raise UserError(
            f"longtake doctor: not enough memory on one device after {len(findings)} checks; choose a larger one, "
            f"fewer --clips than {clips}, or shorter clips by --bucket-config"
        ) from None
    return Examination(run, checkpoint, tuple(findings))


def _examine(
    config: RunConfig,
    world: World,
    folder: Path | None,
    checkpoint: Path | None,
    clips: int,
    quick: bool,
    ema: bool,
    scratch: Path,
    found: Found,
    progress: Callable[[float], None],
) -> None:
    """Every check in turn; `scratch` is a folder for files of this examination."""
    if world.size > 1:
        raise UserError(f"longtake doctor: {world.size} processes run, and it works on one device; start one")
    config = fit_autoencoder(
        config, config.dataset, config.bucket_rule, config.stage_number, scratch, world, lambda line: None
    )
    case = open_case(config, world, Mesh.create(config.parallel, world), clips, trained=False)
    for check in (data.files, data.captions, data.round_trip, data.spread, training.loaded):
        found(check(case))
    _of_training(case, checkpoint, quick, ema, found, progress)
    for check in (model.curve, model.alternatives, model.text, model.conditions, model.known, model.times):
        found(check(case))
    if lines := [] if folder is None else training.lines_of(folder):
        found(training.history(lines, training.rate_key(config)))
    found(machine.data_speed(case, lines))
    found(machine.environment(case, {} if checkpoint is None else RunState.read(checkpoint).versions))


def alone(config: RunConfig) -> RunConfig:
    """Return the same run on one device, in slots of one micro-batch, uncompiled."""
    dataset = config.dataset.model_copy(update={"balance": False})
    own = {"parallel": ParallelConfig(cpu_offload=config.parallel.cpu_offload), "compile": False, "dataset": dataset}
    return config.model_copy(update={**own, "slots_per_step": 1, "load": None, "resume": None})


def _place(run: str) -> tuple[Path | None, Path | None]:
    """Return the run's folder and the checkpoint in it that is meant; None of either for a config file."""
    path = Path(run)
    if not path.is_dir():
        return None, None
    if is_complete(path):
        return path.parent, path
    complete = [info.path for info in list_checkpoints(path) if info.complete]
    return path, complete[-1] if complete else None


def _of_training(
    case: Case,
    checkpoint: Path | None,
    quick: bool,
    ema: bool,
    found: Found,
    progress: Callable[[float], None],
) -> None:
    """What the run's weights are, beside those that it began with, which the case has; it has the run's afterwards."""
    pretrained = case.config.model.from_pretrained is not None
    case.trained = pretrained
    if not quick:
        found(training.overfit(case, on_progress=progress))
    found(training.drawn(case) if pretrained else None)
    if checkpoint is None:
        return
    before, losses = training.sampled(case.system.denoiser), case.losses()
    level = case.level(0.5)
    first = case.shot(level)
    parts = inspect(checkpoint).totals
    steps = RunState.read(checkpoint).clock.global_step
    for expert in case.system.experts:
        load_weights(expert, checkpoint, ema=False)
    case.__dict__.pop("nothing", None)  # it may be a tensor of the denoiser
    case.trained = True
    other = (case.shot(level).prediction - first.prediction).norm() / first.noised.target.float().norm()
    found(training.moved(case, before, float(other), steps))
    raw = case.losses()
    found(training.against_start(losses, raw, pretrained, training.rate_key(case.config)))
    if ema and "ema" in parts:
        for expert in case.system.experts:
            load_weights(expert, checkpoint, ema=True)
        spoiled = training.is_spoiled(losses, raw, pretrained)
        found(training.averaged(raw, case.losses(), case.config.ema_decay, steps, spoiled))
