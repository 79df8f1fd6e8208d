"""A run's forecast: from its config, a number of GPUs and their kind, without launching anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import plan_pass
from longtake.buckets.report import BucketReport
from longtake.contracts import Bucket, UserError
from longtake.data.tables.mix import clip_weights, open_clips, order_columns
from longtake.parallel.degrees import EntryKey
from longtake.parallel.recomputation import Level
from longtake.plan.batches import balanced_batch, largest_batch, longest_seconds
from longtake.plan.layout import FP32, Layout
from longtake.plan.machine import Machine
from longtake.plan.memory import Memory
from longtake.plan.parameters import Weights, weights_of
from longtake.plan.speed import MicroBatchTime, micro_batch_seconds, update_seconds
from longtake.plan.work import RunConfig, Work, read_layout, read_work

_DAY_SECONDS = 86400
_ROUNDING = 1e-9  # by which a time may pass a limit that it was computed from


@dataclass(frozen=True)
class EntryPlan:
    """One `resolution: frames` of the bucket table, at the aspect ratio with the most tokens."""

    bucket: Bucket  # of that ratio, with the batch size as written
    sequence: int  # peers that share the tokens of a micro-batch of it
    slot_size: int  # micro-batches of it that run side by side in the place of one
    tokens: int  # video tokens of one sample
    level: Level  # at which recomputed blocks are
    memory: Memory
    encoding_bytes: int  # activations while its micro-batch is encoded
    time: MicroBatchTime
    usable_bytes: int
    samples: int | None  # of a pass, all ratios together; None where the table could not be read
    largest_batch: int  # that fits; 0: not even one sample does
    suggested_batch: int  # largest that fits and takes no longer than the target, or the longest entry's; 0 likewise

    @property
    def name(self) -> str:
        """Name as in `bucket_config`: resolution and frames."""
        return f"{self.bucket.resolution}/{self.bucket.num_frames}f"

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def trains(self) -> bool:
        """True unless the clip table shows that no clip trains in it."""
        return self.samples is None or self.samples > 0


@dataclass(frozen=True)
class Forecast:
    """Steps, time and price of a whole stage."""

    steps_per_pass: int | None
    seconds_per_pass: float | None
    steps: int | None  # of the stage: `max_steps`, or all passes
    step_seconds: float  # mean over the micro-batches of a pass; over the entries alike where it is not known
    gpus: int
    measured: bool  # whether micro-batches are as measured

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_seconds / _DAY_SECONDS

    @property
    def gpu_hours(self) -> float | None:
        return None if self.days is None else self.days * 24 * self.gpus


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Plan of a run: everything known before it is launched."""

    work: Work
    layout: Layout
    machine: Machine
    entries: tuple[EntryPlan, ...]
    report: BucketReport | None
    no_report: str | None  # why the clip table could not be read
    forecast: Forecast
    target_seconds: float | None = None  # that a step may take at the suggested batch sizes

    @property
    def num_parameters(self) -> int:
        return self.layout.denoisers * self.weights.num_parameters

    @property
    def weights(self) -> Weights:
        """Weights as each GPU holds them."""
        layout = self.layout
        return weights_of(self.work.model, layout)

    @property
    def host_bytes(self) -> int:
        """Memory of the host that each GPU needs for what does not live on it."""
        layout, weights = self.layout, self.weights
        upkeep, average = layout.upkeep, FP32 if layout.ema else 0
        bytes_a_weight = upkeep.moments_bytes * upkeep.moments_offloaded + average * upkeep.ema_offloaded
        frozen = 0
        if layout.offload:
            bytes_a_weight = 2 * upkeep.master_bytes + upkeep.moments_bytes + average
            frozen = weights.frozen
        return layout.denoisers * (int(bytes_a_weight * weights.owned) + frozen) + layout.buffer_bytes

    @property
    def encodes(self) -> bool:
        """True if encoding takes time."""
        return any(entry.time.encoding for entry in self.entries)

    @property
    def degrees_differ(self) -> bool:
        """True if entries run at different sequence degrees."""
        return any(entry.slot_size > 1 for entry in self.entries)

    @property
    def misfits(self) -> tuple[EntryPlan, ...]:
        """Entries that train and need more memory than there is, the worst first."""
        found = [entry for entry in self.entries if entry.trains and not entry.fits]
        return tuple(sorted(found, key=lambda entry: -entry.memory.total))


def plan_run(config: RunConfig, gpus: int, machine: Machine, target_seconds: float | None = None) -> RunPlan:
    """Forecast memory, time and use of data of a run on `gpus` GPUs. `target_seconds`: that a step may take at the
    batch sizes which are suggested. Raises `UserError` for one where batch sizes are not those of a `bucket_config`."""
    work = read_work(config, min(gpus, machine.gpus_per_node))
    if target_seconds is not None and work.rule.place != "bucket_config":
        raise UserError(
            f"--target-step-seconds {target_seconds:g}: the buckets of this run follow from {work.rule.place}, which "
            "has no batch size of each; leave it out, or give the run a bucket_config"
        )
    layout = replace(read_layout(config, gpus, machine.gpus_per_node, machine.device), room=machine.room_bytes)
    report, no_report = _read_report(work, layout)
    return forecast_run(work, layout, machine, report, no_report, target_seconds)


def forecast_run(
    work: Work,
    layout: Layout,
    machine: Machine,
    report: BucketReport | None = None,
    no_report: str | None = None,
    target_seconds: float | None = None,
) -> RunPlan:
    """Return the forecast of a layout. `report`: of the first pass, where the clip table can be read."""
    found = None
    if report is not None:
        found = dict.fromkeys((bucket.entry for bucket in work.entries), 0)
        for line in report.buckets:
            found[line.bucket.entry] += line.samples
    largest = {bucket: largest_batch(work, bucket, layout, machine) for bucket in work.entries}
    if target_seconds is None:
        limit = longest_seconds(work, layout, machine, largest)
    else:
        limit = micro_batch_seconds(work.model, layout, machine, target_seconds)
    entries = []
    for bucket in work.entries:
        balanced = balanced_batch(work, bucket, layout, machine, largest[bucket], limit * (1 + _ROUNDING))
        entries.append(
            EntryPlan(
                bucket=bucket,
                sequence=work.degree(bucket, layout),
                slot_size=work.slot_size(bucket, layout),
                tokens=work.tokens(bucket),
                level=work.level(bucket, layout),
                memory=work.memory(bucket, layout),
                encoding_bytes=work.encoding_bytes(bucket, layout),
                time=work.time(bucket, layout, machine),
                usable_bytes=machine.usable_bytes,
                samples=None if found is None else found[bucket.entry],
                largest_batch=largest[bucket],
                suggested_batch=balanced or min(1, largest[bucket]),
            )
        )
    forecast = forecast_stage(work, layout, machine, report)
    return RunPlan(work, layout, machine, tuple(entries), report, no_report, forecast, target_seconds)


def forecast_stage(
    work: Work,
    layout: Layout,
    machine: Machine,
    report: BucketReport | None,
    measured: Mapping[EntryKey, float] | None = None,
) -> Forecast:
    """Return the length of a stage. `measured`: of entries, the time of a micro-batch over its forecast, encoding
    apart."""
    update, config, measured = update_seconds(work.model, layout, machine), work.config, measured or {}

    def seconds_of(bucket: Bucket) -> float:
        time = work.time(bucket, layout, machine)
        return (time.seconds - time.encoding) * measured.get(bucket.entry, 1) + time.encoding

    if report is None or not report.num_steps:
        mean = sum(map(seconds_of, work.entries)) / max(1, len(work.entries))
        step = layout.micro_batches * mean + update
        return Forecast(None, None, config.max_steps, step, layout.gpus, bool(measured))
    side_by_side = -(-config.slots_at(layout.data_ranks) // layout.micro_batches)
    seconds, slots = report.num_steps * update, 0
    lines = [
        (seconds_of(line.bucket), -(-line.micro_batches // work.slot_size(line.bucket, layout)))
        for line in report.buckets
    ]
    for of_one, count in sorted(lines, reverse=True):  # those of like length side by side: each group takes its longest
        groups = -(-(slots + count) // side_by_side) - -(-slots // side_by_side)
        seconds, slots = seconds + groups * of_one, slots + count
    steps = report.num_steps * config.epochs
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    return Forecast(report.num_steps, seconds, steps, seconds / report.num_steps, layout.gpus, bool(measured))


def _read_report(work: Work, layout: Layout) -> tuple[BucketReport | None, str | None]:
    """Return the bucket report of the first epoch, or the reason why there is none."""
    try:
        table = open_clips(work.config.dataset)
    except (UserError, OSError) as error:
        return None, str(error)
    weights = clip_weights(work.config.dataset, table.num_frames, table.weights)
    return first_pass(work, layout, weights=weights, **order_columns(table)), None


def first_pass(work: Work, layout: Layout, **columns: Any) -> BucketReport:
    """Return the bucket report of the first epoch over clips of these columns: samples kept and dropped, and steps."""
    degrees = {} if layout.bucket_sequence is None else work.degrees(layout)
    inputs = OrderInputs(
        seed=work.config.seed,
        stage=work.config.stage_number,
        slots_per_step=work.config.slots_at(layout.data_ranks),
        rule=work.rule,
        views=work.config.dataset.views,
        slot_sizes={entry: layout.sequence // degree for entry, degree in degrees.items()},
        **columns,
    )
    return plan_pass(inputs, 0).report
