"""The stream of steps: the order of each pass, dealt to the ranks and fetched, with nothing hidden in iterators."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longtake.buckets import OrderInputs, PassOrder, deal
from longtake.contracts import Batch, Fault, Slot, UserError
from longtake.data import Delivery, DeviceFeed, SlotLoader, append_quarantine, read_quarantine
from longtake.parallel import Mesh, World
from longtake.train.peers import share_parcel
from longtake.train.shared_order import plan_shared

SHOWN_FAULTS = 10  # of each rank, one line each; then a count every `COUNTED_FAULTS`
COUNTED_FAULTS = 100


@dataclass
class StepInput:
    """What one optimizer step is made of on this rank. The last three fields are complete once `batches` is used up."""

    pass_index: int
    slots: Sequence[Slot]  # the step's real slots, of all ranks
    state: dict  # data position after the step
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    # this rank's micro-batches on its device, one at a time; number i is slot i * ranks + rank
    loaded: int = 0  # samples of `batches` that could be loaded
    faults: list[Fault] = field(default_factory=list)  # those that could not
    wait_seconds: float = 0.0  # time this rank waited for its data


class StepStream:
    """Steps from a data position on, pass after pass. The position is a plain dict, valid between any two steps."""

    def __init__(
        self,
        inputs: OrderInputs,
        loader: SlotLoader,
        mesh: Mesh,
        world: World,
        quarantine: Path,
        say: Callable[[str], None] = print,
    ) -> None:
        self.inputs, self.loader, self.mesh, self.world, self.quarantine = inputs, loader, mesh, world, quarantine
        self.say = say  # puts a line on this rank's terminal
        self._feed = DeviceFeed.to(world.device)
        self._num_faults = 0

    def plan(self, pass_index: int, state: dict | None) -> PassOrder:
        """The order of a pass from a position on; clips that failed in earlier passes are left out.

        Rank 0's view of the quarantine is everybody's, so no two ranks plan different passes.
        """
        known = self.world.on_main(lambda: read_quarantine(self.quarantine))
        return plan_shared(replace(self.inputs, quarantined=known), pass_index, state, self.world)

    def steps(self, order: PassOrder, skip: int, epochs: int, whole: bool = True) -> Iterator[StepInput]:
        """The steps of `order` (the first `skip` left out), then those of later passes, until `epochs` are done.

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
        ahead: deque[_Ahead] = deque()
        for line in order.report.buckets:
            self._feed.buffers.expect(self.loader.source.batch_bytes(line.bucket))
        deliveries = self._deliveries(_feed(order, skip, self.mesh.data_ranks, self.mesh.data_rank, ahead))
        for _ in range(skip, order.num_steps):
            start = time.perf_counter()
            first = [next(deliveries)]  # only now is it known which step begins
            waited = time.perf_counter() - start
            slots, num_micro, state = ahead.popleft()
            step = StepInput(order.pass_index, slots, state, wait_seconds=waited)
            step.batches = self._batches(step, first, deliveries, num_micro)
            yield step

    def _batches(
        self, step: StepInput, first: list[Delivery], others: Iterator[Delivery], num_micro: int
    ) -> Iterator[Batch]:
        """The micro-batches of a step, none of them kept behind its turn.

        What a micro-batch lost is in the quarantine before it is handed over, and so before the step's update.
        """
        for _ in range(num_micro):
            start = time.perf_counter()
            delivery = first.pop() if first else next(others)
            step.wait_seconds += time.perf_counter() - start
            step.loaded += delivery.loaded
            step.faults += delivery.batch.faults
            self._leave_out(delivery.batch.faults)
            yield delivery.batch
            del delivery

    def _deliveries(self, slots: Iterator[Slot]) -> Iterator[Delivery]:
        """This rank's batches on its device. Where ranks hold parts of the same micro-batches, one of them decodes."""
        peers = self.mesh.peers
        if peers is None:
            yield from self._feed.batches(self.loader.fetch(slots))
            return
        if self.mesh.reads:
            for parcel, loaded in self._feed.parcels(self.loader.fetch(slots)):
                yield Delivery(share_parcel(parcel, loaded, peers, self.world.device)[0].batch, loaded)
        else:
            for _ in slots:
                parcel, loaded = share_parcel(None, 0, peers, self.world.device)
                yield Delivery(replace(parcel.batch, faults=()), loaded)  # the rank that decodes writes them down

    def _leave_out(self, faults: Sequence[Fault]) -> None:
        """Puts what could not be loaded into the quarantine, and says so."""
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


_Ahead = tuple[list[Slot], int, dict[str, Any]]  # the slots of a step, how many of them are this rank's, state after it


def _feed(order: PassOrder, skip: int, num_ranks: int, rank: int, ahead: deque[_Ahead]) -> Iterator[Slot]:
    """This rank's slots, step by step, for the loader to fetch; `ahead` takes in what belongs to each step.

    It refers to no stream: the loader holds on to it, and in a cycle its processes would not end with the run.
    """
    for i in range(skip, order.num_steps):
        slots = order.step(i)
        mine = deal(slots, num_ranks, order.inputs.slots_per_step, rank)
        ahead.append((slots, len(mine), order.state(i + 1)))
        yield from mine
