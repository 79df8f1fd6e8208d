"""A run's forecast: from its config, a number of GPUs and their kind, without launching anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from longtake.buckets import BucketLaw, BucketReport, OrderInputs, plan_pass
from longtake.contracts import Bucket, LatentShape, UserError
from longtake.data import clip_weights, open_clips, order_columns
from longtake.encoders import EncodeCost, autoencoder_cost
from longtake.models import denoiser_class
from longtake.parallel import (
    EntryKey,
    Mesh,
    bucket_degrees,
    check_bucket_sequence,
    check_budget,
    refused_budget,
    resolve_degrees,
)
from longtake.plan.batches import balanced_batch, largest_batch, longest_seconds
from longtake.plan.blocks import budget_levels
from longtake.plan.layout import EIGHT_BIT_BYTES, FP32, Layout, MicroBatch, Upkeep
from longtake.plan.machine import Machine
from longtake.plan.memory import Memory, forecast_memory
from longtake.plan.parameters import Weights, count_weights
from longtake.plan.speed import EncoderWork, MicroBatchTime, forecast_time, micro_batch_seconds, update_seconds
from longtake.system.encoders import encoder_bytes, encoding_costs
from longtake.system.float8 import check_float8

RunConfig = Any  # a training run's config: that of `longtake.train`, which this package must not import
_DAY_SECONDS = 86400
_ROUNDING = 1e-9  # by which a time may pass a limit that it was computed from


@dataclass(frozen=True)
class EntryPlan:
    """One `resolution: frames` of the bucket table, at the aspect ratio with the most tokens."""

    bucket: Bucket  # of that ratio, with the batch size as written
    sequence: int  # peers that share the tokens of a micro-batch of it
    slot_size: int  # micro-batches of it that run side by side in the place of one
    tokens: int  # video tokens of one sample
    budget: float  # of what recomputed blocks keep
    memory: Memory
    encoding_bytes: int  # activations while its micro-batch is encoded
    time: MicroBatchTime
    usable_bytes: int
    samples: int | None  # of a pass, all ratios together; None where the table could not be read
    largest_batch: int  # that fits; 0: not even one sample does
    suggested_batch: int  # largest that fits and takes no longer than the target, or the longest entry's; 0 likewise

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
    measured: bool  # whether micro-batches are as measured

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_seconds / _DAY_SECONDS

    @property
    def gpu_hours(self) -> float | None:
        return None if self.days is None else self.days * 24 * self.gpus


@dataclass(frozen=True)
class Work:
    """A run as a plan sees it: everything that does not depend on how it is laid out over GPUs."""

    config: RunConfig
    rule: BucketLaw
    latent: LatentShape
    text_tokens: int
    encoder_bytes: int  # of frozen weights on one GPU
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what was computed before

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @property
    def model(self) -> Any:
        """The denoiser's section."""
        return self.config.model

    @cached_property
    def entries(self) -> tuple[Bucket, ...]:
        """Each entry of the bucket table that clips can take, at the ratio with the most tokens."""
        largest: dict[tuple[str, int], Bucket] = {}
        for bucket in self.rule.buckets:
            key = bucket.entry
            if key in self.rule.entries and (key not in largest or self.tokens(bucket) > self.tokens(largest[key])):
                largest[key] = bucket
        return tuple(largest.values())

    def tokens(self, bucket: Bucket) -> int:
        """Video tokens of one sample."""
        tokens = denoiser_class(self.model).tokens
        return self._once(bucket.shape, lambda: tokens(self.model, self.latent(*bucket.shape)))

    def micro_batch(self, bucket: Bucket, batch: int | None = None, encoders_of: int = 0) -> MicroBatch:
        """The sizes of one micro-batch of a bucket, of its own batch size where none is given.

        encoders_of: peers that encode it together; 0: encoding is left out.
        """
        batch = bucket.batch_size if batch is None else batch
        most = 0
        if encoders_of:
            most = max(cost.rank_bytes(encoders_of) for cost in self.encoding(bucket.shape, batch).values())
        beside = FP32 * batch * self._once(("beside", bucket.shape), lambda: self._brought(bucket.shape))
        return MicroBatch(batch, self.latent(*bucket.shape), self.text_tokens, most, beside)

    def _brought(self, shape: tuple[int, int, int]) -> int:
        """Numbers of a sample's companions that the denoiser's `needs` do not name: it takes them where they are."""
        latent = self.latent(*shape)
        needs = denoiser_class(self.model).needs(self.model, latent, self.text_tokens)
        still = self.latent(1, *shape[1:])
        of = {"video": lambda one: prod(latent), "stills": lambda one: one.most * prod(still)}
        of["numbers"] = lambda one: shape[0] * one.width
        found = self.config.family.companions(self.model)
        return sum(of[one.kind](one) for one in found if one.condition not in needs)

    def encoding(self, shape: tuple[int, int, int], batch: int) -> Mapping[str, EncodeCost]:
        """What encoding a micro-batch costs, by section; nothing where all comes from a latent store."""
        if _stores_all(self.config):
            return {"": EncodeCost()}
        return self._once((shape, batch), lambda: encoding_costs(self.config, shape, batch))

    def encoder_work(self, bucket: Bucket, batch: int, ranks: int) -> EncoderWork:
        """Of the rank with most to do among so many that share a micro-batch; none where latents come from a store."""
        if self.config.dataset.stored:
            return EncoderWork()
        flops = {name: cost.rank_flops(ranks) for name, cost in self.encoding(bucket.shape, batch).items()}
        video = flops.pop("ae", 0) + self.known_flops(bucket, batch, ranks)
        return EncoderWork(video, sum(flops.values()))

    def known_flops(self, bucket: Bucket, batch: int, ranks: int) -> float:
        """Of that rank for what is known and encoded apart: the mean over the kinds of `condition_config`."""

        def mean() -> float:
            (frames, *sides), weights = bucket.shape, self.config.condition_config or {}
            law, found = self.config.known_law, 0.0
            for kind, weight in weights.items():
                for window in law.windows(kind, self.latent, frames) if weight else ():
                    cost = autoencoder_cost(self.config.ae, (len(window.pixels), *sides), batch)
                    found += weight * cost.rank_flops(ranks) * bool(window.name)
            return found / sum(weights.values()) if found else 0.0

        return self._once(("known", bucket.shape, batch, ranks), mean)

    def degrees(self, layout: Layout) -> dict[EntryKey, int]:
        """The sequence degree of every entry of the bucket table, at the batch sizes as written."""
        parallel = self.config.parallel.model_copy(update={"bucket_sequence": layout.bucket_sequence})

        def length(bucket: Bucket) -> int:
            return self.tokens(bucket) + self.text_tokens

        key = layout.sequence, str(layout.bucket_sequence)
        return self._once(key, lambda: bucket_degrees(parallel, layout.sequence, self.rule.buckets, length))

    def degree(self, bucket: Bucket, layout: Layout) -> int:
        """The sequence degree of one of them."""
        if layout.bucket_sequence is None or layout.sequence == 1:
            return layout.sequence
        return self.degrees(layout)[bucket.entry]

    def slot_size(self, bucket: Bucket, layout: Layout) -> int:
        """Micro-batches of a bucket that the peers of one data rank run side by side."""
        return layout.sequence // self.degree(bucket, layout)

    def budget(self, bucket: Bucket, layout: Layout, batch: int | None = None) -> float:
        """What recomputed blocks keep of a micro-batch of this bucket; where "auto", the most that fits."""
        if layout.budget != "auto":
            return layout.budget
        if not any(layout.remat) or refused_budget(layout.compiled, layout.peers, denoiser_class(self.model)):
            return 0.0

        def most() -> float:
            for budget in budget_levels(self.model, layout.tensor):
                if self.memory(bucket, replace(layout, budget=budget), batch).total <= layout.room:
                    return budget
            return 0.0

        return self._once((bucket, batch, str(layout)), most)

    def own_layout(self, bucket: Bucket, layout: Layout, batch: int | None = None) -> Layout:
        """The layout as a micro-batch of this bucket sees it."""
        return replace(layout.at_degree(self.degree(bucket, layout)), budget=self.budget(bucket, layout, batch))

    def memory(self, bucket: Bucket, layout: Layout, batch: int | None = None, encodes: bool = True) -> Memory:
        """Bytes of a step whose micro-batches are of this bucket, at its own sequence degree.

        encodes: False leaves encoders out, their weights and activations.
        """
        own = self.own_layout(bucket, layout, batch)
        sizes = self.micro_batch(bucket, batch, own.peers if encodes else 0)
        return forecast_memory(self.model, sizes, own, self.encoder_bytes if encodes else 0)

    def encoding_bytes(self, bucket: Bucket, layout: Layout) -> int:
        """Bytes of activations while a micro-batch of this bucket is encoded."""
        sizes = self.micro_batch(bucket, encoders_of=self.degree(bucket, layout) * layout.tensor)
        return sizes.encoding_bytes + sizes.latent_bytes

    def time(self, bucket: Bucket, layout: Layout, machine: Machine, batch: int | None = None) -> MicroBatchTime:
        """Time of one micro-batch of this bucket, and of those that run beside it."""
        own, sizes = self.own_layout(bucket, layout, batch), self.micro_batch(bucket, batch)
        return forecast_time(self.model, sizes, own, machine, self.encoder_work(bucket, sizes.batch, own.peers))


@dataclass(frozen=True, eq=False)
class RunPlan:
    """All that is known of a run before it is launched."""

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


def read_work(config: RunConfig, ranks_per_node: int = 1) -> Work:
    """The work of a run on nodes of so many ranks. Raises `UserError` for buckets that the autoencoder cannot take."""
    rule = config.bucket_rule
    for bucket in rule.buckets:
        config.check_shape(*bucket.shape)
    return Work(config, rule, config.ae.latent, config.text_length, _encoder_bytes(config, ranks_per_node))


def _encoder_bytes(config: RunConfig, ranks_per_node: int) -> int:
    """Of frozen encoders on one GPU; none are held where all comes from a latent store."""
    if _stores_all(config):
        return 0
    return sum(encoder_bytes(config, ranks_per_node).values())


def _stores_all(config: RunConfig) -> bool:
    """Whether everything comes from a latent store, so that nothing is encoded."""
    return config.dataset.stored and config.dataset.latents_missing == "refuse"


def _read_upkeep(config: RunConfig) -> Upkeep:
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


def read_layout(config: RunConfig, gpus: int, gpus_per_node: int) -> Layout:
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
    mesh.check_model(kind := denoiser_class(config.model), kind.heads(config.model))
    check_bucket_sequence(config.parallel, sequence)
    compiled, budget = bool(config.compile), config.model.grad_ckpt_budget
    if budget != "auto":
        check_budget(budget, compiled, sequence * tensor, kind)
    check_float8(config.precision, tensor, eager=not compiled)
    ranks = replicate * shard
    return Layout(
        replicate=replicate,
        shard=shard,
        sequence=sequence,
        tensor=tensor,
        zero=config.parallel.zero,
        remat=config.model.grad_ckpt_settings or (),
        ema=config.ema_decay is not None,
        compute_bytes=2 if config.dtype == "bf16" else 4,
        reduce_bytes=2 if config.parallel.reduce_dtype == "bf16" else 4,
        prefetch=max(1, config.parallel.backward_prefetch),
        offload=config.parallel.cpu_offload,
        budget=budget,
        buffer_bytes=config.model.grad_ckpt_buffer_size,
        compiled=compiled,
        float8=config.precision == "fp8",
        bucket_sequence=config.parallel.bucket_sequence,
        sequence_attention=config.parallel.sequence_attention,
        upkeep=_read_upkeep(config),
        micro_batches=-(-config.slots_at(ranks) // ranks),
    )


def plan_run(config: RunConfig, gpus: int, machine: Machine, target_seconds: float | None = None) -> RunPlan:
    """Forecasts memory, time and use of data of a run on `gpus` GPUs. `target_seconds`: that a step may take at the
    batch sizes which are suggested. Raises `UserError` for one where batch sizes are not those of a `bucket_config`."""
    work = read_work(config, min(gpus, machine.gpus_per_node))
    if target_seconds is not None and work.rule.place != "bucket_config":
        raise UserError(
            f"--target-step-seconds {target_seconds:g}: the buckets of this run follow from {work.rule.place}, which "
            "has no batch size of each; leave it out, or give the run a bucket_config"
        )
    layout = replace(read_layout(config, gpus, machine.gpus_per_node), room=machine.room_bytes)
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
    """The forecast of a layout. `report`: of the first pass, where the clip table can be read."""
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
                budget=work.budget(bucket, layout),
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
    """The length of a stage. `measured`: of entries, the time of a micro-batch over its forecast, encoding apart."""
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
    """What the first pass keeps and drops; or why that cannot be said."""
    try:
        table = open_clips(work.config.dataset)
    except (UserError, OSError) as error:
        return None, str(error)
    weights = clip_weights(work.config.dataset, table.num_frames, table.weights)
    return first_pass(work, layout, weights=weights, **order_columns(table)), None


def first_pass(work: Work, layout: Layout, **columns: Any) -> BucketReport:
    """What the first pass over clips of these columns keeps and drops, in how many steps."""
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
