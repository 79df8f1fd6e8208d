"""Checks of speed and of what the run computes on."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longtake import __version__
from longtake.doctor.case import Case
from longtake.doctor.finding import Finding

_WAITING = 0.2  # share of its time that a run may wait for data
_LEAST_FREE = 5e9  # bytes


def data_speed(case: Case, lines: Sequence[Mapping[str, Any]] = ()) -> Finding:
    """Reading clips alone, beside what a step needs; of a run that has trained, what it waited."""
    name = "data speed"
    reading = _least_seconds(lambda: case.dataset[case.slot]) / case.count
    step = _least_seconds(lambda: _step(case)) / case.size
    workers = max(1, min(case.config.num_workers, os.cpu_count() or 1))
    figure = f"a clip is read in {1e3 * reading:.1f} ms by one process, trained in {1e3 * step:.1f} ms; "
    figure += f"{case.config.num_workers} loader processes"
    last = [line for line in lines[-200:] if line.get("seconds")]
    waited = sum(line.get("wait", 0.0) for line in last) / sum(line["seconds"] for line in last) if last else None
    if waited is not None:
        figure += f"; the run waited {waited:.0%} of its last {len(last)} steps"
    slow = reading / workers > step and (waited is None or waited > _WAITING)
    if slow:
        advice = "raise num_workers, set dataset.cache_mb, or encode ahead: `longtake data encode RUN -o FOLDER`"
        return Finding(name, figure, "suspect", "a slow run: data cannot keep up with steps", advice, 0.35)
    return Finding(name, figure)


def _step(case: Case) -> None:
    """Forward and backward of one micro-batch."""
    noised, conditions = case.clean.noised(case.system, level=case.level(0.5))
    row = slice(0, case.size)
    prediction = case.system.denoiser(noised.x[row], noised.t[row], conditions.map(lambda tensor: tensor[row]))
    prediction.float().square().mean().backward()
    case.system.denoiser.zero_grad(set_to_none=True)
    if case.system.device.type == "cuda":
        torch.cuda.synchronize(case.system.device)


def _least_seconds(work: Callable[[], object]) -> float:
    """Of two tries; of short work as many as half a second holds, for other processes are in the way of some."""
    found: list[float] = []
    while len(found) < 2 or (sum(found) < 0.5 and len(found) < 50):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def environment(case: Case, versions: Mapping[str, str]) -> Finding:
    """Device, dtype, versions and room; versions: those that the run was made with."""
    name, config, device = "environment", case.config, case.system.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    dtype = str(case.system.dtype).removeprefix("torch.")
    here = {"longtake": __version__, "torch": torch.__version__, "python": platform.python_version()}
    figure = f"{where}, {dtype}, longtake {__version__}, torch {torch.__version__}, Python {here['python']}"
    other = [f"{key} {value}" for key, value in versions.items() if here.get(key, value) != value]
    figure += f"; the run was made with {', '.join(other)}" if other else ""
    outputs = next(
        path for path in (Path(config.outputs).absolute(), *Path(config.outputs).absolute().parents) if path.exists()
    )
    if (free := shutil.disk_usage(outputs).free) < _LEAST_FREE:
        figure += f"; {free / 1e9:.1f} GB free in {outputs}"
        return Finding(name, figure, "suspect", "a full disk", "make room for checkpoints, or name other outputs", 0.3)
    if device.type == "cpu" and torch.cuda.is_available():
        return Finding(name, figure, "suspect", "a slow run: a GPU is there and not used", 'write device = "auto"', 0.3)
    if device.type == "cuda" and config.dtype == "bf16" and dtype != "bfloat16":
        cause = "a slow run: this GPU has no bfloat16"
        return Finding(name, figure, "suspect", cause, "train on a GPU of Ampere's generation or later", 0.3)
    return Finding(name, figure)
