"""A run's forecast: from its config, a number of GPUs and their kind, without launching anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any, Protocol

import torch

from longtake.buckets import BucketReport, BucketRule, OrderInputs, plan_pass
from longtake.contracts import Bucket, LatentShape, UserError
from longtake.data import DatasetConfig, open_clips, order_columns
from longtake.encoders import AutoencoderConfig, EncodeCost, PooledEncoderConfig, TextEncoderConfig, build_autoencoder
from longtake.models import LoraConfig, MMDiTConfig, token_grid
from longtake.parallel import (
    Entry,
    Mesh,
    ParallelConfig,
    bucket_degrees,
    check_bucket_sequence,
    check_budget,
    resolve_degrees,
)
from longtake.plan.memory import Layout, Memory, MicroBatch, encoding_bytes, forecast_memory
from longtake.plan.parameters import EIGHT_BIT_BYTES, FP32, Upkeep, Weights, count_weights
from longtake.plan.speed import Machine, MicroBatchTime, forecast_time, update_seconds
from longtake.system.encoders import encoder_bytes, encoding_costs

_DAY_SECONDS = 86400
_ROUNDING = 1e-9  # by which a time may pass a limit that it was computed from
_MOST_SAMPLES = 4096  # of one micro-batch; more is never of use


class PlannedOptimizer(Protocol):
    """What a plan reads of how an optimizer keeps its states."""

    states: str
    offload: bool


class PlannedRun(Protocol):
    """What a plan reads of a training run's config."""

    model: MMDiTConfig
    ae: AutoencoderConfig
    t5: TextEncoderConfig
    clip: PooledEncoderConfig
    lora: LoraConfig | None
    freeze: tuple[str, ...]
    train_only: tuple[str, ...] | None
    master_dtype: str
    optim: PlannedOptimizer
    ema_offload: bool
    parallel: ParallelConfig
    compile: bool
    dtype: str
    seed: int
    compat: str | None
    size_divisor: int
    dataset: DatasetConfig
    bucket_config: Mapping[str, Mapping[int, Any]]
    ema_decay: float | None
    accumulation_steps: int
    slots_per_step: int | None
    epochs: int
    max_steps: int | None


@dataclass(frozen=True)
class EntryPlan:
    """One `resolution: frames` of the bucket table, at the aspect ratio with the most tokens."""

    bucket: Bucket  # of that ratio, with the batch size as written
    sequence: int  # peers that share the tokens of a micro-batch of it
    slot_size: int  # micro-batches of it that run side by side in the place of one
    latent_shape: tuple[int, int, int, int]
    tokens: int  # video tokens of one sample
    memory: Memory
    encoding_bytes: int  # activations while its micro-batch is encoded
    time: MicroBatchTime
    usable_bytes: int
    samples: int | None  # of a pass, all ratios together; None where the table could not be read
    largest_batch: int  # that fits; 0: not even one sample does
    suggested_batch: int  # largest that fits and takes no longer than the longest entry's; 0 likewise

    @property
    def name(self) -> str:
        """As in `bucket_config`: resolution and frames."""
        return f"{self.bucket.resolution}/{self.bucket.num_frames}f"

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def trains(self) -> bool:
        """Whether any clip is known, or has to be expected, to be trained in it."""
        return self.samples is None or self.samples > 0


@dataclass(frozen=True)
class Forecast:
    """Steps, time and price of a whole stage."""

    steps_per_pass: int | None
    seconds_per_pass: float | None
    steps: int | None  # of the stage: `max_steps`, or all passes
    step_seconds: float  # mean over the micro-batches of a pass; over the entries alike where it is not known
    gpus: int

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_seconds / _DAY_SECONDS

    @property
    def gpu_hours(self) -> float | None:
        return None if self.days is None else self.days * 24 * self.gpus


@dataclass(frozen=True)
class Work:
    """A run as the formulas see it: everything that does not depend on how it is laid out over GPUs."""

    config: PlannedRun
    rule: BucketRule
    latent: LatentShape
    text_tokens: int
    encoder_bytes: int  # of frozen weights on one GPU

    @property
    def model(self) -> MMDiTConfig:
        return self.config.model

    @cached_property
    def entries(self) -> tuple[Bucket, ...]:
        """Each entry of the bucket table that clips can take, at the ratio with the most tokens."""
        reachable = {
            (resolution.name, entry.num_frames)
            for resolution in self.rule.resolutions
            for entry in resolution.entries
            if entry.reachable
        }
        largest: dict[tuple[str, int], Bucket] = {}
        for bucket in self.rule.buckets:
            key = bucket.resolution, bucket.num_frames
            if key in reachable and (key not in largest or self.tokens(bucket) > self.tokens(largest[key])):
                largest[key] = bucket
        return tuple(largest.values())

    def tokens(self, bucket: Bucket) -> int:
        """Video tokens of one sample."""
        return prod(token_grid(self.latent(*bucket.shape)[1:], self.model.patch_size))

    def micro_batch(self, bucket: Bucket, batch: int | None = None, peers: int = 1) -> MicroBatch:
        """The sizes of one micro-batch of a bucket, of its own batch size where none is given, shared by so many."""
        channels, frames, height, width = self.latent(*bucket.shape)
        time, rows, columns = bucket.shape
        batch = bucket.batch_size if batch is None else batch
        costs = self.encoding(bucket.shape, batch)
        return MicroBatch(
            batch=batch,
            video_tokens=self.tokens(bucket),
            text_tokens=self.text_tokens,
            latent_numbers=channels * frames * height * width,
            pixel_numbers=3 * time * rows * columns,
            autoencoder_bytes=costs["ae"].num_bytes,
            text_bytes=max(costs["t5"].rank_bytes(peers), costs["clip"].rank_bytes(peers)),
        )

    def encoding(self, shape: tuple[int, int, int], batch: int) -> dict[str, EncodeCost]:
        """What encoding a micro-batch costs, by section; nothing where all comes from a latent store."""
        if _stores_all(self.config):
            return dict.fromkeys(("ae", "t5", "clip"), EncodeCost())
        if (shape, batch) not in self._encodings:
            self._encodings[shape, batch] = encoding_costs(self.config, shape, batch)
        return self._encodings[shape, batch]

    @cached_property
    def _encodings(self) -> dict[tuple[tuple[int, int, int], int], dict[str, EncodeCost]]:
        return {}

    def encoder_flops(self, bucket: Bucket, batch: int, ranks: int) -> float:
        """Of the rank with most to do among so many that share a micro-batch; none where latents come from a store."""
        if self.config.dataset.latents is not None:
            return 0.0
        costs = self.encoding(bucket.shape, batch)
        return sum(cost.rank_flops(ranks) for cost in costs.values())

    def degrees(self, layout: Layout) -> dict[Entry, int]:
        """The sequence degree of every entry of the bucket table, at the batch sizes as written."""
        parallel = self.config.parallel.model_copy(update={"bucket_sequence": layout.bucket_sequence})
        buckets = self.rule.buckets
        return bucket_degrees(parallel, layout.sequence, buckets, lambda one: self.tokens(one) + self.text_tokens)

    def degree(self, bucket: Bucket, layout: Layout) -> int:
        """The sequence degree of one of them."""
        if layout.bucket_sequence is None or layout.sequence == 1:
            return layout.sequence
        return self.degrees(layout)[bucket.resolution, bucket.num_frames]

    def slot_size(self, bucket: Bucket, layout: Layout) -> int:
        """Micro-batches of a bucket that the peers of one data rank run side by side."""
        return layout.sequence // self.degree(bucket, layout)

    def memory(self, bucket: Bucket, layout: Layout, batch: int | None = None, encodes: bool = True) -> Memory:
        """Bytes of a step whose micro-batches are of this bucket, at its own sequence degree.

        encodes: False leaves encoders out, their weights and activations.
        """
        own = layout.at_degree(self.degree(bucket, layout))
        sizes = self.micro_batch(bucket, batch, own.sequence * own.tensor)
        if not encodes:
            sizes = replace(sizes, autoencoder_bytes=0, text_bytes=0)
        return forecast_memory(self.model, sizes, own, self.encoder_bytes if encodes else 0)

    def encoding_bytes(self, bucket: Bucket, layout: Layout) -> int:
        """Bytes of activations while a micro-batch of this bucket is encoded."""
        return encoding_bytes(self.micro_batch(bucket, peers=self.degree(bucket, layout) * layout.tensor))

    def time(self, bucket: Bucket, layout: Layout, machine: Machine, batch: int | None = None) -> MicroBatchTime:
        """Time of one micro-batch of this bucket, and of those that run beside it."""
        own, latent_shape = layout.at_degree(self.degree(bucket, layout)), self.latent(*bucket.shape)
        sizes = self.micro_batch(bucket, batch)
        encoder_flops = self.encoder_flops(bucket, sizes.batch, own.sequence * own.tensor)
        return forecast_time(self.model, latent_shape, sizes, own, machine, encoder_flops)


@dataclass(frozen=True)
class RunPlan:
    """All that is known of a run before it is launched."""

    work: Work
    layout: Layout
    machine: Machine
    entries: tuple[EntryPlan, ...]
    report: BucketReport | None
    no_report: str | None  # why the clip table could not be read
    forecast: Forecast

    @property
    def num_parameters(self) -> int:
        return self.weights.num_parameters

    @property
    def weights(self) -> Weights:
        """Weights as each GPU holds them."""
        layout = self.layout
        return count_weights(self.work.model, layout.weight_shards, layout.upkeep, layout.compute_bytes)

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
        return int(bytes_a_weight * weights.owned) + frozen + layout.buffer_bytes

    @property
    def encodes(self) -> bool:
        """Whether encoding takes time."""
        return any(entry.time.encoding for entry in self.entries)

    @property
    def degrees_differ(self) -> bool:
        """Whether entries run at different sequence degrees."""
        return any(entry.slot_size > 1 for entry in self.entries)

    @property
    def misfits(self) -> tuple[EntryPlan, ...]:
        """Entries that train and need more memory than there is, the worst first."""
        found = [entry for entry in self.entries if entry.trains and not entry.fits]
        return tuple(sorted(found, key=lambda entry: -entry.memory.total))


def read_work(config: PlannedRun, ranks_per_node: int = 1) -> Work:
    """The work of a run on nodes of so many ranks. Raises `UserError` for buckets that the autoencoder cannot take."""
    rule = BucketRule.from_config(config.bucket_config, config.size_divisor, config.dataset.fps_max, config.compat)
    with torch.device("meta"):
        autoencoder = build_autoencoder(config.ae)
    for bucket in rule.buckets:
        autoencoder.check(*bucket.shape)
    return Work(config, rule, config.ae.latent, config.t5.max_length, _encoder_bytes(config, ranks_per_node))


def _encoder_bytes(config: PlannedRun, ranks_per_node: int) -> int:
    """Of frozen encoders on one GPU; none are held where all comes from a latent store."""
    if _stores_all(config):
        return 0
    return sum(encoder_bytes(config, ranks_per_node).values())


def _stores_all(config: PlannedRun) -> bool:
    """Whether everything comes from a latent store, so that nothing is encoded."""
    return config.dataset.latents is not None and config.dataset.latents_missing == "refuse"


def _read_upkeep(config: PlannedRun) -> Upkeep:
    """What of the weights trains, and how it is kept."""
    return Upkeep(
        lora=config.lora,
        freeze=config.freeze,
        train_only=config.train_only,
        master_bytes=2 if config.master_dtype == "bf16" else FP32,
        moments_bytes=EIGHT_BIT_BYTES if config.optim.states == "8bit" else 2 * FP32,
        moments_offloaded=config.optim.offload,
        ema_offloaded=config.ema_offload,
    )


def read_layout(config: PlannedRun, gpus: int, gpus_per_node: int) -> Layout:
    """How the config cuts its model over `gpus` GPUs. Raises `UserError` where it does not divide."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise UserError(
            f"--gpus {gpus}: does not fill nodes of {gpus_per_node} GPUs; choose a multiple of {gpus_per_node}, or set "
            "--gpus-per-node"
        )
    replicate, shard, sequence, tensor = resolve_degrees(config.parallel, gpus)
    node = min(gpus, gpus_per_node)
    if node % tensor:
        raise UserError(
            f"parallel.tensor = {tensor}: tensor peers must lie in one node, of {node} GPUs here; choose a divisor of "
            f"{node}"
        )
    mesh = Mesh(replicate, shard, sequence, tensor, 0, config.parallel, weights=None)  # of no process; for its checks
    mesh.check_heads(config.model.num_heads)
    check_bucket_sequence(config.parallel, sequence)
    check_budget(config.model.grad_ckpt_budget, config.compile, sequence * tensor)
    ranks = replicate * shard
    slots = config.slots_per_step or ranks * config.accumulation_steps
    return Layout(
        replicate=replicate,
        shard=shard,
        sequence=sequence,
        tensor=tensor,
        zero=config.parallel.zero,
        remat=config.model.grad_ckpt_settings or (0, 0),
        ema=config.ema_decay is not None,
        compute_bytes=2 if config.dtype == "bf16" else 4,
        reduce_bytes=2 if config.parallel.reduce_dtype == "bf16" else 4,
        prefetch=max(1, config.parallel.backward_prefetch),
        offload=config.parallel.cpu_offload,
        budget=config.model.grad_ckpt_budget,
        buffer_bytes=config.model.grad_ckpt_buffer_size,
        bucket_sequence=config.parallel.bucket_sequence,
        sequence_attention=config.parallel.sequence_attention,
        upkeep=_read_upkeep(config),
        micro_batches=-(-slots // ranks),
    )


def plan_run(config: PlannedRun, gpus: int, machine: Machine) -> RunPlan:
    """Forecasts memory, time and use of data of a run on `gpus` GPUs."""
    work = read_work(config, min(gpus, machine.gpus_per_node))
    layout = read_layout(config, gpus, machine.gpus_per_node)
    report, no_report = _read_report(work, layout)
    return forecast_run(work, layout, machine, report, no_report)


def forecast_run(
    work: Work, layout: Layout, machine: Machine, report: BucketReport | None = None, no_report: str | None = None
) -> RunPlan:
    """The forecast of a layout. `report`: of the first pass, where the clip table can be read."""
    found = None
    if report is not None:
        found = dict.fromkeys(((b.resolution, b.num_frames) for b in work.entries), 0)
        for line in report.buckets:
            found[line.bucket.resolution, line.bucket.num_frames] += line.samples
    largest = {bucket: largest_batch(work, bucket, layout, machine) for bucket in work.entries}
    limit = longest_seconds(work, layout, machine, largest)
    entries = []
    for bucket in work.entries:
        balanced = largest_batch(work, bucket, layout, machine, limit * (1 + _ROUNDING))
        entries.append(
            EntryPlan(
                bucket=bucket,
                sequence=work.degree(bucket, layout),
                slot_size=work.slot_size(bucket, layout),
                latent_shape=work.latent(*bucket.shape),
                tokens=work.tokens(bucket),
                memory=work.memory(bucket, layout),
                encoding_bytes=work.encoding_bytes(bucket, layout),
                time=work.time(bucket, layout, machine),
                usable_bytes=machine.usable_bytes,
                samples=None if found is None else found[bucket.resolution, bucket.num_frames],
                largest_batch=largest[bucket],
                suggested_batch=balanced or min(1, largest[bucket]),
            )
        )
    forecast = _forecast(work, layout, machine, tuple(entries), report)
    return RunPlan(work, layout, machine, tuple(entries), report, no_report, forecast)


def largest_batch(work: Work, bucket: Bucket, layout: Layout, machine: Machine, limit: float = inf) -> int:
    """The largest batch size of a bucket that fits and takes no more than `limit` seconds; 0: none does.

    Found by halving, for memory and time grow with it.
    """

    def is_fine(batch: int) -> bool:
        fits = work.memory(bucket, layout, batch).total <= machine.usable_bytes
        return fits and work.time(bucket, layout, machine, batch).seconds <= limit

    low, high = 0, 1
    while high <= _MOST_SAMPLES and is_fine(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if is_fine(middle):
            low = middle
        else:
            high = middle
    return min(low, _MOST_SAMPLES)


def longest_seconds(work: Work, layout: Layout, machine: Machine, largest: Mapping[Bucket, int]) -> float:
    """How long a micro-batch may take: as long as the entry of most tokens takes at its largest batch.

    A step waits for its slowest rank, so others gain nothing from a larger batch that takes longer, and this one
    cannot be given a larger one.
    """
    fitting = [bucket for bucket, batch in largest.items() if batch]
    if not fitting:
        return 0.0
    longest = max(fitting, key=work.tokens)
    return work.time(longest, layout, machine, largest[longest]).seconds


def _forecast(
    work: Work, layout: Layout, machine: Machine, entries: tuple[EntryPlan, ...], report: BucketReport | None
) -> Forecast:
    update = update_seconds(work.model, layout, machine)
    config = work.config
    if report is None or not report.num_steps:
        mean = sum(entry.time.seconds for entry in entries) / max(1, len(entries))
        step = layout.micro_batches * mean + update
        return Forecast(None, None, config.max_steps, step, layout.gpus)
    slots = sum(
        -(-line.micro_batches // work.slot_size(line.bucket, layout)) * work.time(line.bucket, layout, machine).seconds
        for line in report.buckets
    )
    seconds = slots / layout.data_ranks + report.num_steps * update
    steps = report.num_steps * config.epochs
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    return Forecast(report.num_steps, seconds, steps, seconds / report.num_steps, layout.gpus)


def _read_report(work: Work, layout: Layout) -> tuple[BucketReport | None, str | None]:
    """What the first pass keeps and drops; or why that cannot be said."""
    config = work.config
    try:
        table = open_clips(config.dataset)
    except (UserError, OSError) as error:
        return None, str(error)
    ranks = layout.data_ranks
    inputs = OrderInputs(
        seed=config.seed,
        stage=config.stage_number,
        slots_per_step=config.slots_per_step or ranks * config.accumulation_steps,
        rule=work.rule,
        weights=table.weights,
        views=config.dataset.views,
        **order_columns(table),
        slot_sizes={entry: layout.sequence // degree for entry, degree in work.degrees(layout).items()},
    )
    return plan_pass(inputs, 0).report, None


def with_layout(plan: RunPlan, **changes: Any) -> RunPlan:
    """The same run laid out otherwise."""
    layout = replace(plan.layout, **changes)
    return forecast_run(plan.work, layout, plan.machine, plan.report, plan.no_report)
