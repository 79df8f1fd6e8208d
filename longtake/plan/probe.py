"""Holding a plan against the machine: real steps on random data, and the batch sizes that really fit.

Model, optimizer and average are those of the run, with initial values in place of weights read from files. Encoders are
not built: the bytes of their weights are the plan's, their activations and time are left out. Started under torchrun it
measures the mesh of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from longtake.contracts import Bucket, UserError
from longtake.data.latents.source import EncoderFacts
from longtake.models.build import example_conditions
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World
from longtake.plan.batches import MOST_SAMPLES
from longtake.plan.run import EntryPlan, RunPlan, forecast_stage
from longtake.plan.speed import micro_batch_seconds
from longtake.plan.timing import clock
from longtake.system.build import System, build_system, with_low_noise
from longtake.system.config import SystemConfig

_TRIES = 6  # steps that are measured for one entry
_GROWTH = 4  # of a batch in one try where nothing tells how much memory is left


@dataclass(frozen=True)
class Measured:
    """One step at one batch size."""

    batch: int
    seconds: float | None  # of forward and backward of one micro-batch; None: it ran out of memory
    peak_bytes: int | None  # on the fullest GPU; None where the device does not tell

    def fits(self, usable_bytes: int) -> bool:
        """Return whether it ran within `usable_bytes`."""
        return self.seconds is not None and (self.peak_bytes is None or self.peak_bytes <= usable_bytes)


@dataclass(frozen=True)
class Probed:
    """Measurements of one entry of the bucket table."""

    entry: EntryPlan
    forecast_bytes: int  # of the largest batch that fits, without encoders
    tries: tuple[Measured, ...]
    largest: Measured | None  # the largest measured batch that fits, and keeps to the plan's target if it has one
    suggested_batch: int  # that, or without a target one that takes no longer than the entry of most tokens at its own

    @property
    def error(self) -> float | None:
        """The forecast over the measured peak, less 1."""
        if self.largest is None or not self.largest.peak_bytes:
            return None
        return self.forecast_bytes / self.largest.peak_bytes - 1


Measure = Callable[[Bucket, int], Measured]
MakeUpdate = Callable[[nn.Module], Callable[[], None]]


def probe_entries(plan: RunPlan, measure: Measure, memory_known: bool = True) -> tuple[Probed, ...]:
    """Measure the entries that train, beginning at the batch sizes that the plan suggests. Where the device does not
    tell its memory, those of the run are all that is measured, but under a target of seconds."""
    work, layout, limit = plan.work, plan.layout.least, None
    if plan.target_seconds is not None:
        limit = micro_batch_seconds(work.model, layout, plan.machine, plan.target_seconds)
    usable = plan.machine.usable_bytes - work.encoder_bytes
    found = []
    for entry in plan.entries:
        if not entry.trains:
            continue

        def forecast(batch: int, bucket: Bucket = entry.bucket) -> int:
            return work.memory(bucket, layout, batch, encodes=False).total

        def run(batch: int, bucket: Bucket = entry.bucket) -> Measured:
            return measure(bucket, batch)

        def allowed(batch: int, bucket: Bucket = entry.bucket) -> float:
            if limit is None:
                return math.inf
            return limit - work.time(bucket, layout, plan.machine, batch).encoding

        first = max(1, entry.suggested_batch) if memory_known else entry.bucket.batch_size
        tries = tuple(_search(run, forecast, first, usable, allowed))
        fitting = [step for step in tries if step.fits(usable) and step.seconds <= allowed(step.batch)]
        largest = max(fitting, key=lambda step: step.batch, default=None)
        found.append((entry, forecast(largest.batch) if largest else 0, tries, largest))
    longest = math.inf
    if limit is None:
        longest = _longest([(entry, largest) for entry, _, _, largest in found if largest is not None])
    return tuple(Probed(*facts, suggested_batch=_suggested(facts[3], longest)) for facts in found)


def as_measured(plan: RunPlan, probed: Sequence[Probed]) -> RunPlan:
    """Return the plan with its step and stage by measured micro-batches, those of each entry at the batch size
    nearest to its own; encoding and the update are as forecast."""
    factors = {}
    for one in probed:
        bucket, timed = one.entry.bucket, [step for step in one.tries if step.seconds is not None]
        for step in sorted(timed, key=lambda step: abs(step.batch - bucket.batch_size))[:1]:
            time = plan.work.time(bucket, plan.layout.least, plan.machine, step.batch)
            factors[bucket.resolution, bucket.num_frames] = step.seconds / (time.seconds - time.encoding)
    return replace(plan, forecast=forecast_stage(plan.work, plan.layout, plan.machine, plan.report, factors))


def _search(
    run: Callable[[int], Measured],
    forecast: Callable[[int], int],
    first: int,
    usable_bytes: int,
    allowed: Callable[[int], float],
) -> Iterator[Measured]:
    """Step at batch sizes around the largest that fits and take no longer than `allowed`: the
    forecast, corrected by what was measured, says where."""
    low, high, batch = 0, None, first  # the largest that will do and the smallest that will not, so far
    timed: list[Measured] = []
    for _ in range(_TRIES):
        step = run(batch)
        yield step
        seconds = allowed(batch)
        if step.fits(usable_bytes) and step.seconds <= seconds:
            low = batch
            if (step.peak_bytes is None and seconds == math.inf) or batch == MOST_SAMPLES:
                return  # nothing tells how much more there is room for
        else:
            high = batch
        if high is not None and high - low <= 1:
            return
        if step.seconds is None:
            batch = (low + batch) // 2
        else:
            timed.append(step)
            slope, in_memory = max(1, forecast(batch + 1) - forecast(batch)), _GROWTH * batch
            if step.peak_bytes is not None:
                in_memory = batch + (usable_bytes - step.peak_bytes) // slope
            if high is None and in_memory <= low:
                return  # one more would not fit, says the slope
            batch = in_memory if seconds == math.inf else min(in_memory, _batch_within(timed, seconds))
        if batch <= low:
            batch = low + 1 if high is None else (low + high + 1) // 2
        batch = max(1, min(batch, MOST_SAMPLES if high is None else high - 1))
        if batch == low:
            return


def _batch_within(timed: Sequence[Measured], seconds: float) -> int:
    """Return the batch size that would take so long, by the last two that were timed."""
    last, before = timed[-1], timed[-2] if len(timed) > 1 else Measured(0, 0.0, None)
    rise = (last.seconds - before.seconds) / (last.batch - before.batch) if last.batch != before.batch else 0.0
    if rise <= 0:
        rise = last.seconds / last.batch
    return last.batch + int((seconds - last.seconds) // max(rise, 1e-9))


def _longest(found: list[tuple[EntryPlan, Measured]]) -> float:
    if not found:
        return 0.0
    return max(found, key=lambda pair: pair[0].tokens)[1].seconds or 0.0


def _suggested(largest: Measured | None, limit: float) -> int:
    if largest is None:
        return 0
    return max(1, int(min(largest.batch, limit * 1.02 / (largest.seconds / largest.batch))))


class ProbeStep:
    """Steps of a run on this process's device, on random latents and embeddings of any bucket and batch size."""

    def __init__(self, plan: RunPlan, config: SystemConfig, world: World, make_update: MakeUpdate) -> None:
        self.plan, self.world = plan, world
        self._config, self._make_update = config, make_update
        self._mesh = Mesh.create(config.parallel, world)
        self._build()

    def _build(self) -> None:
        config = self._config
        model = config.model.model_copy(update={"from_pretrained": None})
        lora = None if config.lora is None else config.lora.model_copy(update={"from_pretrained": None})
        length = config.text_length
        empty = example_conditions(config.model, config.ae.latent(1, *2 * [config.size_divisor]), length)
        facts = EncoderFacts(config.ae.latent, length, dict(empty))
        low_noise = config.low_noise
        if low_noise is not None:
            low_noise = low_noise.model_copy(update={"from_pretrained": None, "lora": None})
        bare = config.model_copy(update={"model": model, "lora": lora, "low_noise": low_noise})
        self.system: System = build_system(bare, self._mesh, self.world, facts)
        if low_noise is not None:
            self.system = with_low_noise(self.system, self.world, trained=True)
        degrees = self.plan.work.degrees(self.plan.layout)
        self.peers = BucketPeers.create(
            self._mesh, degrees, self.system.cut, type(self.system.denoiser).heads(config.model)
        )
        # a step updates one denoiser, and the state of the others is there too
        self._update, *self._idle_updates = [self._make_update(one.denoiser) for one in self.system.experts]
        self._warm = False

    def measure(self, bucket: Bucket, batch: int) -> Measured:
        """Return a whole step of micro-batches of this size. Raises `UserError` where one of several GPUs has not
        enough."""
        device = self.world.device
        on_gpu = device.type == "cuda"
        seconds = None
        try:
            if not self._warm:
                self._step(bucket, 1)  # states of the optimizer come with the first update
                self._warm = True
            if on_gpu:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            seconds = self._step(bucket, batch)
            if self.plan.target_seconds is not None:  # which the first step of a shape would miss: it chooses kernels
                seconds = self._step(bucket, batch)
        except torch.OutOfMemoryError:
            if self.world.size > 1:
                raise UserError(
                    f"--probe: {self.plan.work.rule.place}.{bucket.resolution}.{bucket.num_frames} ran out of memory "
                    f"at batch {batch}; give it a lower one in the run, or pass a larger --headroom"
                ) from None
        if seconds is None:  # out here, for the error holds on to what the step had made
            self._rebuild()
            return Measured(batch, None, None)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        facts = torch.tensor([peak, seconds], dtype=torch.float64, device=device)
        if self.world.size > 1:
            dist.all_reduce(facts, dist.ReduceOp.MAX)
        peak, seconds = facts.tolist()
        return Measured(batch, seconds, int(peak) or None)

    def _step(self, bucket: Bucket, batch: int) -> float:
        """Seconds of the last micro-batch's forward and backward."""
        system, device = self.system, self.world.device
        self.peers.use(self.peers.degree(bucket))
        shape = system.latent(*bucket.shape)
        for _ in range(min(2, self.plan.layout.micro_batches)):
            conditions = system.example_conditions(bucket.shape, batch)
            start = self._now()
            x, target = (torch.randn(batch, *shape, device=device) for _ in range(2))
            prediction = system.denoiser(x, torch.rand(batch, device=device), conditions)
            loss = (prediction.float() - target).square().mean()
            del prediction, x, target, conditions  # a run's backward has none of them either
            loss.backward()
            del loss
            seconds = self._now() - start
        self._update()
        self._now()
        return seconds

    def _now(self) -> float:
        return clock(self.world.device)

    def _rebuild(self) -> None:
        """Start again with the memory that was free at first: sharded weights that a backward was broken off over would
        have no gradients from then on."""
        del self.system, self.peers, self._update, self._idle_updates
        self.world.free_memory()
        self._build()


def check_probe(gpus: int, world: World) -> None:
    """Raise `UserError` where the plan is for another number of GPUs than there are processes or devices."""
    if world.device.type == "cuda" and torch.cuda.device_count() < (world.local_size or gpus):
        raise UserError(
            f"--gpus {gpus}: --probe finds {(found := torch.cuda.device_count())} GPUs on this machine; choose "
            f"{f'--nproc_per_node {found}' if world.local_size else f'--gpus {found}'}"
        )
    if gpus != world.size:
        said = "1 process runs" if world.size == 1 else f"{world.size} processes run"
        raise UserError(
            f"--gpus {gpus}: --probe measures real steps and {said}; choose --gpus {world.size}, or start it by "
            f"`torchrun --nproc_per_node {gpus} -m longtake plan RUN --gpus {gpus} --probe`"
        )
