"""The stream of steps: the order of each pass, dealt to the ranks and fetched, with nothing hidden in iterators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import tee
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longtake.buckets.dealing import deal
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import PassOrder
from longtake.contracts import Batch, ClipFault, Slot, UserError
from longtake.data.loading.loader import SlotLoader
from longtake.data.loading.parcel import Parcel
from longtake.data.loading.quarantine import append_quarantine, read_quarantine
from longtake.parallel.degrees import BucketPeers, Subgroup
from longtake.parallel.world import World
from longtake.train.feed import DeviceFeed
from longtake.train.shared_order import plan_shared

SHOWN_FAULTS = 10  # of each rank, one line each; then a count every `COUNTED_FAULTS`
COUNTED_FAULTS = 100


@dataclass(frozen=True)
class Turn:
    """One forward of this rank."""

    slot: Slot
    number: int | None  # its place among the step's micro-batches, on the rank that reports its loss, else None
    reader: int  # which of the ranks that share the micro-batch decodes it
    reads: bool  # whether that is this rank


@dataclass
class StepInput:
    """Inputs of one optimizer step on this rank. The last three fields are complete once `batches` is used up."""

    pass_index: int
    slots: Sequence[Slot]  # the step's micro-batches, of all ranks; all of them real
    state: dict  # data position after the step
    ends_pass: bool = False
    turns: Sequence[Turn] = ()  # the forwards of this rank; every rank makes as many
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))  # of `turns`, on the device, one at a time
    loaded: int = 0  # samples that could be loaded, of the micro-batches whose loss this rank reports
    faults: list[ClipFault] = field(default_factory=list)  # those that this rank could not load
    wait_seconds: float = 0.0  # time this rank waited for its data

    @property
    def loss_divisor(self) -> float:
        """Sum of planned samples / batch size over all micro-batches of the step: their number, where all are full.

        It follows from the plan, so that ranks need no exchange before backward.
        """
        return sum(slot.num_samples / slot.bucket.batch_size for slot in self.slots)


@dataclass(eq=False)
class StepStream:
    """Steps from a data position on, pass after pass. The position is a plain dict, valid between any two steps."""

    inputs: OrderInputs
    loader: SlotLoader
    peers: BucketPeers
    world: World
    quarantine: Path
    say: Callable[[str], None]  # puts a line on this rank's terminal
    table: Path | None = None  # the clip table's file, beside which orders are kept

    def __post_init__(self) -> None:
        self._feed = DeviceFeed(self.world.device)
        self._num_faults = 0

    def plan(self, pass_index: int, state: dict | None) -> PassOrder:
        """Return the order of a pass from a position on; clips that failed in earlier passes are left out.

        Rank 0's view of the quarantine is everybody's, so no two ranks plan different passes.
        """
        known = self.world.on_main(lambda: read_quarantine(self.quarantine))
        return plan_shared(replace(self.inputs, quarantined=known), pass_index, state, self.world, self.table, self.say)

    def steps(self, order: PassOrder, skip: int, epochs: int, whole: bool = True) -> Iterator[StepInput]:
        """Yield the steps of `order` (the first `skip` left out), then those of later passes, until `epochs` are done.

        `whole`: whether `order` is that of a pass from its start. Raises `UserError` at a whole pass without a step
        before any step was made.
        """
        any_step = False
        while order.pass_index < epochs:
            if whole and not any_step and order.report.num_steps == 0:
                raise UserError(_empty_pass(order))
            for step in self._one_pass(order, skip):
                any_step = True
                yield step
            self.world.barrier()  # every rank's failures are on disk before the next pass is planned
            if order.pass_index + 1 == epochs:
                return
            order, skip, whole = self.plan(order.pass_index + 1, None), 0, True

    def _one_pass(self, order: PassOrder, skip: int) -> Iterator[StepInput]:
        for line in order.report.buckets:
            self._feed.buffers.expect(self.loader.source.batch_bytes(line.bucket))
        # The loader runs ahead of the steps; what it has passed waits in `steps` for its turn. Neither refers to the
        # stream: the loader holds on to its own, and in a cycle its processes would not end with the run.
        steps, ahead = tee(_steps(order, skip, self.peers))
        fetched = self.loader.fetch(turn.slot for step in ahead for turn in step.turns if turn.reads)
        parcels = self._feed.parcels(fetched)
        for step in steps:
            step.batches = self._batches(step, parcels)
            yield step

    def _batches(self, step: StepInput, parcels: Iterator[tuple[Parcel, int]]) -> Iterator[Batch]:
        """Yield the micro-batches of a step, none of them kept after its turn.

        What a micro-batch lost is in the quarantine before it is handed over, and so before the step's update.
        """
        for turn in step.turns:
            start = time.perf_counter()
            batch, loaded = self._next(turn, parcels)
            step.wait_seconds += time.perf_counter() - start
            if turn.number is not None:
                step.loaded += loaded
            step.faults += batch.faults
            self._leave_out(batch.faults)
            yield batch
            del batch

    def _next(self, turn: Turn, parcels: Iterator[tuple[Parcel, int]]) -> tuple[Batch, int]:
        """Return a batch on this rank's device, decoded by one of the ranks that share it, and how many
        samples train."""
        parcel, loaded = next(parcels) if turn.reads else (None, 0)
        groups = self.peers.groups(turn.slot.bucket)
        if groups.talk is not None:
            parcel, loaded = share_parcel(parcel, loaded, turn.reader, groups, self.world.device)
        faults = parcel.plan.faults if turn.reads else ()  # the rank that decodes writes them down
        return replace(parcel.batch, faults=faults), loaded

    def _leave_out(self, faults: Sequence[ClipFault]) -> None:
        """Put what could not be loaded into the quarantine, and say so."""
        append_quarantine(self.quarantine, faults)
        for fault in faults:
            self._num_faults += 1
            if self._num_faults <= SHOWN_FAULTS:
                self.say(f"left out {fault.path}: {fault.reason}")
            elif self._num_faults % COUNTED_FAULTS == 0:
                self.say(f"left out {self._num_faults} clips so far; see {self.quarantine}")


def _empty_pass(order: PassOrder) -> str:
    why = ", ".join(f"{line.clips} {line.reason.sentence}" for line in order.report.unused)
    return (
        f"pass {order.pass_index}: has no step, none of the {order.report.num_clips} clips is used in it ({why}); "
        "raise the keep probabilities in bucket_config or the mix weights of the clips"
    )


def _steps(order: PassOrder, skip: int, peers: BucketPeers) -> Iterator[StepInput]:
    """Yield the steps of an order as this rank sees them, still without their batches.

    Ranks that share micro-batches decode them in turns, so each has as much to decode.
    """
    mesh, made = peers.mesh, 0  # forwards so far
    for i in range(skip, order.num_steps):
        slots, turns = order.step(i), []
        for forward in deal(slots, mesh.data_ranks, mesh.data_rank, peers.at_once):
            bucket = forward.slots[0].bucket
            which, place = peers.place(bucket)
            reader = made % peers.count(bucket)
            number = forward.number(which) if place == 0 else None
            turns.append(Turn(forward.slots[which], number, reader, place == reader))
            made += 1
        yield StepInput(order.pass_index, slots, order.state(i + 1), i + 1 == order.num_steps, turns)


def share_parcel(
    parcel: Parcel | None, loaded: int, reader: int, groups: Subgroup, device: torch.device
) -> tuple[Parcel, int]:
    """Return the parcel of one rank of the groups, with the number of its samples that train, on all of their ranks.

    Collective. Rank `reader` of the groups gives it, on `device`; the others give None and 0. Two messages: the plan
    over the CPU, so that no device is waited for, and the bytes of all tensors together.
    """
    assert groups.talk is not None
    source = dist.get_global_rank(groups.talk, reader)
    assert (dist.get_rank(groups.talk) == reader) == (parcel is not None)
    box: list[Any] = [(parcel.plan, len(parcel.data), loaded) if parcel is not None else None]
    dist.broadcast_object_list(box, src=source, group=groups.talk, device=torch.device("cpu"))
    plan, num_bytes, loaded = box[0]
    data = parcel.data if parcel is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=source, group=groups.data)
    return Parcel(plan, data), loaded
