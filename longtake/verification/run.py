"""A verification from its preset to its record."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from longtake import __version__
from longtake.config.load import Dialect
from longtake.contracts import UserError
from longtake.encoders.extras import needs_extra
from longtake.parallel.world import World, start_world
from longtake.presets import presets
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.run_file import read_run, words_of_stages
from longtake.verification.parts import check_parts
from longtake.verification.release import download_missing
from longtake.verification.report import PartResult, TrainingResult, Verification
from longtake.verification.training import train_steps

_PACKAGES = ("torch", "diffusers", "transformers", "triton")


def verify(
    source: str,
    overrides: Sequence[str] = (),
    *,
    steps: int = 50,
    dialect: Dialect | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Verify a run's released weights on this process's device.

    `steps`: of training, 0 for none. `report` is given the name of each part as it begins. Raises `UserError` where
    the run cannot be read or its weights cannot be had; what is wrong with them is in the record.
    """
    if len(stages := words_of_stages(source, overrides)) > 1:
        raise UserError(f"verify: the run has stages; add --stage {stages[0][-1]}")
    config = _read(source, overrides, dialect)
    if config.model.from_pretrained is None:
        raise UserError("model.from_pretrained = None: the run starts from scratch; add --model.from-pretrained FILE")
    _load_libraries(source)
    report("weights")
    if download_missing(config):
        config = _read(source, overrides, dialect)
    with start_world(config.device) as world:
        if world.size > 1:
            raise UserError(f"verify: expected one process, got {world.size}; start it without torchrun")
        parts, training = _results(config, world, steps, report)
        return Verification(
            preset=_preset_name(source),
            family=config.family.name,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            device=_device_name(world),
            device_gib=_device_gib(world),
            versions=_versions(),
            parts=tuple(parts),
            training=training,
        )


def _results(
    config: RunConfig, world: World, steps: int, report: Callable[[str], None]
) -> tuple[list[PartResult], TrainingResult]:
    """Results of parts and of training; what comes after a device that has failed is left out."""
    parts: list[PartResult] = []
    try:
        for part in check_parts(config, world.device, report):
            parts.append(part)
    except torch.AcceleratorError:
        return parts, TrainingResult(problem=f"not run: the device failed in {parts[-1].name}")
    if not steps:
        return parts, TrainingResult()
    report("training")
    with tempfile.TemporaryDirectory() as folder:
        return parts, train_steps(config, world, Path(folder), steps)


def _read(source: str, overrides: Sequence[str], dialect: Dialect | None) -> RunConfig:
    return read_run(source, overrides, RunWithoutTable, dialect=dialect).value


def _load_libraries(source: str) -> None:
    """Load what the references are of, without messages on its own parts. Raises `UserError` where it is missing."""
    with needs_extra("verify", source):
        from diffusers import AutoencoderKL  # noqa: F401 (diffusers loads the rest with it)
        from transformers.utils import logging
    logging.disable_progress_bar()


def _preset_name(source: str) -> str:
    path = Path(source).resolve()
    return next((one.name for one in presets() if one.path == path), "a run of one's own")


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"CPU ({platform.machine()})"


def _device_gib(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(world.device).total_memory / 2**30, 1)


def _versions() -> dict[str, str]:
    found = {"longtake": __version__, "python": platform.python_version(), "system": platform.system()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
