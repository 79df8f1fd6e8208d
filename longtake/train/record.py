"""Metrics of a run: one exact line for each step, readable figures every few steps."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtake.buckets.dealing import step_digest
from longtake.checkpoint.state import Clock
from longtake.contracts import ClipFault, Slot, UserError
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.parallel.host import pinned_like
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.track.meters import StepMeter, memory
from longtake.track.progress import TrainingProgress
from longtake.track.trackers import Trackers
from longtake.train.health.interrupt import read_flags
from longtake.train.health.state import Health
from longtake.train.health.weights import LARGEST, describe_broken
from longtake.train.saving import Saver
from longtake.train.sums import StepSums

_SHOWN = ("loss", "grad_norm", "lr", "clips_per_second", "tflops_per_device", "mfu", "wait_share", "goodput")
_LOST_IN_A_ROW = 8  # samples of steps without a sample: steps of one clip must outlive a bad clip


@dataclass(frozen=True)
class StepRecord:
    """A step as the loop leaves it: the device may still be computing `sums`."""

    clock: Clock  # after the step
    slots: Sequence[Slot]  # its micro-batches
    sums: StepSums  # on the device
    rates: Mapping[str, float]  # learning rates by their groups; that of most parameters comes first
    wait_seconds: float
    samples: int  # of this step, fillers not counted
    tokens: int
    faults: Sequence[ClipFault] = ()  # what this rank could not load for it
    nodes: Sequence[str] = ()  # those of `sums.watts`
    ranks: HostCopy | None = None  # see RankTimes.step
    expert: str | None = None  # the denoiser that the step trained, where there are two

    @property
    def lr(self) -> float:
        """The learning rate of most parameters."""
        return next(iter(self.rates.values()))


class HostCopy:
    """Numbers being copied to the host: queued after the kernels that make them, waited for when they are read."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._there = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = pinned_like(numbers).copy_(numbers, non_blocking=True)
            self._there = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[Any]:
        """Return the numbers; kernels queued after the copy keep running."""
        if self._there is not None:
            self._there.synchronize()
        return self._numbers.tolist()


@dataclass
class MeanLoss:
    """Mean loss of micro-batches, each of which counts by the share of its places that hold a loaded sample."""

    total: float = 0.0
    share: float = 0.0

    def add(self, loss: float, share: float) -> None:
        """Take in a micro-batch, see `StepSums.losses` and `StepSums.shares`."""
        self.total += loss
        self.share += share

    @property
    def mean(self) -> float:
        """0 where no sample was loaded."""
        return self.total / self.share if self.share else self.total


@dataclass
class Recorder:
    """Reads results one step late, so that the device always has work queued, and passes them on.

    Every rank reads the same numbers and so comes to the same decisions; rank 0 writes.
    """

    system: System
    table: ClipTable | MixedTable
    world: World
    trackers: Trackers
    progress: TrainingProgress
    meter: StepMeter
    log_every: int
    health: Health  # its tally of samples is that up to the last step that was read
    saver: Saver

    def __post_init__(self) -> None:
        self._pending: tuple[StepRecord, HostCopy, float] | None = None
        self._last: tuple[int, float, StepRecord] | None = None
        self._losses: list[float] = []
        self._by_bucket: dict[str, MeanLoss] = defaultdict(MeanLoss)
        self._last_time = time.perf_counter()
        self._in_a_row = 0  # samples of the steps since the last one of which a sample could be loaded
        self._first_fault: ClipFault | None = None  # that this rank met in those steps
        self._any_loaded = False
        self._requests = 0

    def push(self, record: StepRecord) -> bool:
        """Take in a step and read the one before it; return whether any rank was asked to stop by then.

        Raises `UserError` if too many steps in a row had to be left out, or nothing can be loaded any more.
        """
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        flops = 3 * sum(self.system.flops(slot.bucket.shape) * slot.num_samples for slot in record.slots)
        self.meter.step(clips=record.samples, tokens=record.tokens, flops=flops, wait_seconds=record.wait_seconds)
        before, self._pending = self._pending, (record, HostCopy(record.sums.values), seconds)
        return self._read(*before) if before is not None else False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from the speed of steps."""
        start = time.perf_counter()
        with self.meter.paused(), self.progress.paused():
            yield
        self._last_time += time.perf_counter() - start

    def take_requests(self) -> int:
        """Return the requests that the last step read has collected: bits of `REQUESTS`, each once."""
        found, self._requests = self._requests, 0
        return found

    def flush(self) -> bool:
        """Read the last step too (waits for the device)."""
        before, self._pending = self._pending, None
        return self._read(*before) if before is not None else False

    def close(self) -> None:
        """Read the last step and pass on what has gathered since the last figures."""
        self.flush()
        if self._last is not None and self._losses:
            self._log(*self._last)

    def _read(self, record: StepRecord, arriving: HostCopy, seconds: float) -> bool:
        sums = record.sums.on_host(arriving.read())
        self.health.first_step.done()
        self.health.watchdog.beat(record.clock.global_step)
        grad_norm = math.sqrt(sums.grad_square) if sums.grad_square >= 0 else math.nan
        counts = self.health.skipped.take(sums.losses, sums.grad_square)
        self.health.stopwatch.step(record.wait_seconds, counts)
        loaded = round(sums.loaded)
        self._check_loaded(record, loaded)
        self.health.lost = self.health.lost.add(record.samples, loaded)
        if self.world.is_main:
            self._write(record, seconds, sums, grad_norm, counts)
        if self.health.skipped.too_many:
            self._end_for_skipped_steps(record, sums.losses, grad_norm)
        stop, requests = read_flags(sums.flags)
        self._requests |= requests
        return stop

    def _write(self, record: StepRecord, seconds: float, sums: StepSums, grad_norm: float, counts: bool) -> None:
        """Rank 0: the step's line, and every `log_every` steps the figures since the last time."""
        step, whole = record.clock.global_step, MeanLoss()
        by_bucket: dict[str, MeanLoss] = defaultdict(MeanLoss)
        watts = dict(zip(record.nodes, sums.watts, strict=True))
        for slot, loss, share in zip(record.slots, sums.losses, sums.shares, strict=False):  # of fewer than the most
            whole.add(loss, share)
            by_bucket[slot.bucket.name].add(loss, share)
            if counts:
                self._by_bucket[slot.bucket.name].add(loss, share)
                if record.expert is not None:
                    self._by_bucket[record.expert].add(loss, share)
        loss = whole.mean
        if counts and whole.share:
            self._losses.append(loss)
        self.trackers.log_line(
            {
                "step": step,
                "pass": record.clock.pass_index,
                **({"expert": record.expert} if record.expert else {}),
                "loss": loss,
                "loss_bits": loss.hex(),
                "digest": f"{step_digest(record.slots):016x}",
                "grad_norm": grad_norm,
                "lr": record.lr,
                "samples": round(sums.loaded),
                "seconds": round(seconds, 4),
                "wait": round(record.wait_seconds, 4),
                "buckets": {name: value.mean for name, value in by_bucket.items()},
                **({"drawn": _drawn(record.slots)} if len(by_bucket) > 1 else {}),
                **({"rates": dict(record.rates)} if len(record.rates) > 1 else {}),
                **({"watts": {node: round(of, 1) for node, of in watts.items()}} if any(watts.values()) else {}),
                **({"ranks": _of_ranks(record.ranks)} if record.ranks is not None else {}),
                **({} if counts else {"skipped": True, "clips": self._clips(record)}),
            }
        )
        self._last = (step, grad_norm, record)
        self.progress.update(step, self._log(*self._last) if step % self.log_every == 0 else {"loss": loss})

    def _log(self, step: int, grad_norm: float, record: StepRecord) -> dict[str, float]:
        """Pass on the figures since the last time; return those that the terminal shows."""
        figures = {"loss": sum(self._losses) / len(self._losses)} if self._losses else {}
        figures |= {
            "grad_norm": grad_norm,
            "lr": record.lr,
            "pass": record.clock.pass_index,
            "samples": record.clock.samples,
        }
        if len(record.rates) > 1:
            figures |= {f"lr/{name}": rate for name, rate in record.rates.items()}
        figures |= {f"loss/{name}": value.mean for name, value in sorted(self._by_bucket.items()) if value.share}
        figures |= self.meter.read() | memory() | {"goodput": self.health.stopwatch.seconds.goodput}
        self.health.stopwatch.write()
        self.trackers.log(step, figures)
        self._losses.clear()
        self._by_bucket.clear()
        return {name: v for name, v in figures.items() if name in _SHOWN}

    def _check_loaded(self, record: StepRecord, loaded: int) -> None:
        """End the run, on all ranks together, where whole steps go by without a sample that could be loaded."""
        if loaded:
            self._in_a_row, self._first_fault, self._any_loaded = 0, None, True
            return
        self._in_a_row += record.samples
        if self._first_fault is None and record.faults:
            self._first_fault = record.faults[0]
        if self._in_a_row >= _LOST_IN_A_ROW:
            self._end_for_lack_of_data(record)

    def check_trained(self) -> None:
        """Raise `UserError` if steps were made, and not one sample of all of them could be loaded."""
        before = self._pending
        self.flush()
        if before is not None and not self._any_loaded:
            self._end_for_lack_of_data(before[0])

    def _end_for_lack_of_data(self, record: StepRecord) -> None:
        found = [fault for fault in self.world.gather(self._first_fault) if fault is not None]
        first = f"{found[0].path}: {found[0].reason}" if found else "all of them are in quarantine.jsonl"
        raise UserError(
            f"step {record.clock.global_step}: none of its {record.samples} samples could be loaded (first: {first}); "
            "check dataset.root, and delete quarantine.jsonl in the run's folder before you continue the run, so that "
            "its clips are tried again"
        )

    def _clips(self, record: StepRecord) -> list[str]:
        """Return the samples of a step by their clips' ids, 16 hexadecimal digits each."""
        rows = [int(row) for slot in record.slots for row in slot.rows[: slot.num_samples]]
        return [f"{int(self.table.clip_ids[row]) & 0xFFFFFFFFFFFFFFFF:016x}" for row in rows]

    def _end_for_skipped_steps(self, record: StepRecord, losses: list[float], grad_norm: float) -> None:
        bad = [slot for slot, loss in zip(record.slots, losses, strict=False) if not math.isfinite(loss)]
        step, limit = record.clock.global_step, self.health.skipped.norm_limit
        rows = (bad[0] if bad else record.slots[0]).rows[:3]
        clips = ", ".join(self.table.location(int(row)) for row in rows)
        what = f"loss of bucket {bad[0].bucket.name} is not finite" if bad else "gradient norm is not finite"
        if not bad and math.isfinite(grad_norm):
            what = f"gradient norm is {grad_norm:.4g}, above skip_grad_norm = {limit:g}"
        skipped = self.health.skipped.in_a_row - 1
        before = f" after {skipped} steps that were left out" if skipped else ""
        remedy = "nothing was saved meanwhile, so continue from the last checkpoint"
        is_finite = not bad and math.isfinite(grad_norm)
        if not is_finite and (aside := self.saver.set_aside(step - self.health.skipped.in_a_row)):
            remedy = (
                f"the checkpoint before them, which no step has confirmed, is now {aside}; continue from an earlier one"
            )
        weights = {one.prefix + name: p for one in self.system.experts for name, p in one.denoiser.named_parameters()}
        if broken := describe_broken(weights, self.world):
            raise UserError(
                f"step {step}: the {what}{before}: weights hold NaN, infinity or values above {LARGEST:g} ({broken}); "
                f"check the weights that the run starts from; {remedy}"
            )
        raise UserError(
            f"step {step}: the {what}{before} (clips of that micro-batch begin with {clips}); {remedy} with a lower "
            "lr, grad_clip = 1.0, or without those clips"
        )


def _drawn(slots: Sequence[Slot]) -> dict[str, int]:
    """Return the samples of a step by bucket, those that could not be loaded included."""
    found: dict[str, int] = defaultdict(int)
    for slot in slots:
        found[slot.bucket.name] += slot.num_samples
    return dict(found)


def _of_ranks(figures: HostCopy) -> dict[str, Any]:
    """Return the times and work of each rank, from `RankTimes.step`."""
    seconds, waits, work = ([float(f"{value:.4g}") for value in of] for of in zip(*figures.read(), strict=True))
    return {"seconds": seconds, "wait": waits, "tflop": work[0]}
