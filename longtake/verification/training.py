"""Some steps of a run on drawn clips, as `longtake train` makes them, beside the plan's forecast."""

from __future__ import annotations

import io
import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from longtake.contracts import Bucket, UserError
from longtake.data.clips.video import video_writer
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import cover
from longtake.durable import write_whole
from longtake.parallel.config import ParallelConfig
from longtake.parallel.world import World
from longtake.plan.machine import Machine
from longtake.track.devices import Gpu
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.config import RunConfig
from longtake.train.run import RunLaunch
from longtake.verification.parts import reason_of
from longtake.verification.report import TrainingResult

_WARM_UP = 5  # steps whose time is not counted: kernels are chosen and compiled in them
_FPS = 24
_MORE = 2  # frames of a clip beyond those of its bucket, which some families ask for
TABLE = "clips.parquet"


def train_steps(config: RunConfig, world: World, folder: Path, num_steps: int) -> TrainingResult:
    """Train on the entry of the bucket table with the fewest tokens, videos first; no checkpoint is written.

    `folder`: for clips and the run's files. What ends training is told as the result's problem.
    """
    from longtake.plan.run import plan_run

    device = world.device
    machine, forecast_known = _machine(device)
    plan = plan_run(config, 1, machine)
    bucket = min((entry.bucket for entry in plan.entries), key=lambda one: (one.num_frames == 1, math.prod(one.shape)))
    result = TrainingResult(bucket=bucket.name, batch_size=bucket.batch_size)
    config = _short_run(config, bucket, folder, num_steps)
    write_clips(config, bucket, folder, count=max(4, 2 * bucket.batch_size))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    problem = None
    try:
        _train(config, world, num_steps)
    except torch.OutOfMemoryError:
        problem = "ran out of memory; choose a preset for one smaller GPU, or a smaller --bucket-config"
    except (UserError, RuntimeError) as error:  # such as a kernel that does not compile
        problem = reason_of(error)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    metrics = folder / config.exp_name / METRICS_FILE
    lines = read_lines(metrics) if metrics.is_file() else []
    result = replace(result, steps=len(lines), peak_bytes=peak, problem=problem)
    return _with_lines(result, lines, config, machine if forecast_known else None)


def _machine(device: torch.device) -> tuple[Machine, bool]:
    """Return the device of this process as a plan has it, and whether its speed is known."""
    from longtake.plan.machine import CPU
    from longtake.plan.measure import device_here, device_named
    from longtake.plan.rates import measured_rates

    try:
        name = device_here(device)
        return Machine(device_named(name), measured=measured_rates(name)), True
    except UserError:
        return Machine(Gpu(CPU, CPU, 1e11, 64, 1e10, 1e10)), False


def _short_run(config: RunConfig, bucket: Bucket, folder: Path, num_steps: int) -> RunConfig:
    """Return the run on one device and in one bucket, without checkpoints, trackers and validation."""
    dataset = config.dataset.model_copy(
        update={"data_path": str(folder / TABLE), "mix": None, "root": None, "latents": None, "captions": None}
    )
    changes: dict[str, Any] = {
        "dataset": dataset,
        "parallel": ParallelConfig(zero=config.parallel.zero, cpu_offload=config.parallel.cpu_offload),
        "slots_per_step": 1,
        "accumulation_steps": 1,
        "max_steps": num_steps,
        "time_limit": None,
        "epochs": 1_000_000,
        "outputs": str(folder),
        "exp_name": "run",
        "ckpt_every": 0,
        "lora_files": {},
        "log_every": 1,
        "num_workers": min(config.num_workers, 2),
        "validation": None,
        "validate_every": 0,
        "validate_every_passes": 0,
        "load": None,
        "resume": None,
        "tensorboard": False,
        "wandb": False,
    }
    if config.bucket_config:
        changes["bucket_config"] = {bucket.resolution: {bucket.num_frames: (1.0, bucket.batch_size)}}
    known = type(config).model_fields
    return config.model_copy(update={key: value for key, value in changes.items() if key in known})


def _train(config: RunConfig, world: World, num_steps: int) -> None:
    launch = RunLaunch(config, world, "verification", Console(file=io.StringIO()))
    with ExitStack() as parts:
        prepared = launch.prepare(parts)
        prepared.saver.started_from(prepared.place.path, num_steps)  # the last step needs no checkpoint
        launch.run(prepared)


def write_clips(config: RunConfig, bucket: Bucket, folder: Path, count: int) -> None:
    """Write clips of a bucket's shape and their table, `TABLE`: a disc that crosses the frame, with the captions and
    control videos that the family wants."""
    frames, height, width = bucket.shape
    sizes, rules = config.sizes, config.sample_rules
    stride = getattr(sizes, "video_sample_stride", None) or rules.stride or 1
    fps = min(config.dataset.fps_max or _FPS, _FPS)
    captions = rules.segments(frames) if rules.segments is not None else 1
    columns = [one.column for one in rules.companions if one.kind == "video"]
    lines = [",".join(["path", "text", *columns])]
    for number in range(count):
        name = f"clip_{number}.mp4"
        _draw(folder / name, frames * stride + _MORE if frames > 1 else 1, height, width, fps, number)
        texts = [f"a disc moves through part {part} of clip {number}" for part in range(captions)]
        text = texts[0] if rules.segments is None else json.dumps(texts)
        quoted = '"' + text.replace('"', '""') + '"'
        lines.append(",".join([name, quoted, *[name] * len(columns)]))
    write_whole(folder / "clips.csv", "\n".join(lines) + "\n", synced=False)
    probe_table(folder / "clips.csv", folder / TABLE)


def _draw(path: Path, frames: int, height: int, width: int, fps: float, number: int) -> None:
    colour = np.array([(230, 60, 40), (60, 200, 70), (50, 80, 230), (220, 210, 60)][number % 4])
    share = np.linspace(0.2, 0.8, frames)
    centres = np.stack([share * width, np.full(frames, 0.5 * height)], axis=1)
    with video_writer(path, (height, width), fps) as add:
        for centre in centres:
            coverage = cover("circle", centre[None], 0.15 * min(height, width), height, width)[..., None]
            add(np.rint(90 + coverage * (colour - 90)).astype(np.uint8))


def _with_lines(
    result: TrainingResult, lines: list[dict[str, Any]], config: RunConfig, machine: Machine | None
) -> TrainingResult:
    """Return the result with what the log says: losses, the time of a step, and the forecast of the buckets
    that ran."""
    from longtake.plan.logged import compare_with_log
    from longtake.plan.run import plan_run

    losses = [float(line["loss"]) for line in lines]  # JSON has nan as a text
    if not losses:
        return replace(result, problem=result.problem or "no step was made")
    problem = result.problem
    if bad := [line["step"] for line, loss in zip(lines, losses, strict=True) if not math.isfinite(loss)]:
        problem = problem or f"the loss of step {bad[0]} is not finite"
    timed = lines[_WARM_UP:] or lines
    seconds = median(line["seconds"] - line.get("wait", 0.0) for line in timed)
    result = replace(
        result, first_loss=losses[0], last_loss=losses[-1], step_seconds=round(seconds, 5), problem=problem
    )
    if machine is None:
        return result
    plan = plan_run(config, 1, machine)
    ran = {name for line in lines for name in line["buckets"]}
    entries = {bucket.entry for bucket in plan.work.rule.buckets if bucket.name in ran}
    memory = max((entry.memory.total for entry in plan.entries if entry.bucket.entry in entries), default=None)
    compared = compare_with_log(plan, lines, range(lines[0]["step"], lines[0]["step"] + _WARM_UP))
    forecast = None if compared is None else round(seconds / compared.middle, 5)
    return replace(result, forecast_seconds=forecast, forecast_bytes=memory if result.peak_bytes else None)
