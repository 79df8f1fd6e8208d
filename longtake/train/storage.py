"""Where tensors live that are needed once a step: on the device, or in the host's memory.

Moments kept by the host pass through the device, a chunk at a time, and are updated there: the next chunk comes in and
the last one goes out while one is updated. So the update is the same, bit by bit, wherever its tensors live, a step
that is left out is known to the device alone, and nothing waits. (torchao's CPUOffloadOptimizer updates on the CPU,
which must wait for the gradient's norm, knows of no step that is left out, and moves as many bytes through slower
memory.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from longtake.parallel import pin, unpin

CHUNK_BYTES = 128 << 20  # long enough that a copy runs at full speed; `SLOTS` of them lie on the device
SLOTS = 3  # one comes in, one is updated, one goes out
_ALIGNMENT = 512

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # the tensors that belong to one parameter, by name
Pass = tuple[Sequence[int], Sequence[Mapping[str, Tensor]]]  # which parameters, and their tensors on the device


class OnDevice:
    """Tensors, zero at first, that stay on the device."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device) -> None:
        self.tensors = [
            {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}
            for layout in layouts
        ]

    def walk(self) -> Iterator[Pass]:
        """All tensors at once, to be read and changed."""
        yield range(len(self.tensors)), self.tensors

    def wait(self) -> None:
        """Until `tensors` may be read or written outside of `walk`."""


class OnHost:
    """Tensors, zero at first, in (pinned) host memory. On a CPU it is all plain copies."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device, chunk_bytes: int | None = None) -> None:
        """`chunk_bytes`: what passes through the device at once; None: `CHUNK_BYTES`."""
        chunks = list(_chunks(layouts, CHUNK_BYTES if chunk_bytes is None else chunk_bytes))
        sizes = [sum(_size(layouts[i]) for i in chunk) for chunk in chunks]
        self._hosts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        if device.type == "cuda":
            for host in self._hosts:
                if pin(host):  # refused, copies are only slower
                    weakref.finalize(self, unpin, host.data_ptr()).atexit = False
        room = max(sizes, default=0)
        self._slots = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, len(chunks)))]
        self.tensors: list[Mapping[str, Tensor]] = []
        self._passes: list[Pass] = []
        for number, chunk in enumerate(chunks):
            mine = [layouts[i] for i in chunk]
            self.tensors += _views(self._hosts[number], mine)
            self._passes.append((chunk, _views(self._slots[number % SLOTS], mine)))
        self._lanes = _Lanes(device)

    def walk(self) -> Iterator[Pass]:
        """The tensors on the device, chunk by chunk, to be read and changed there."""
        for number in range(len(self._passes) + 1):
            if number < len(self._passes):
                host = self._hosts[number]
                self._lanes.bring(number % SLOTS, self._slots[number % SLOTS][: len(host)], host)
            if number > 0:  # one ahead is on its way by now
                slot, host = (number - 1) % SLOTS, self._hosts[number - 1]
                self._lanes.arrived(slot)
                yield self._passes[number - 1]
                self._lanes.take_back(slot, host, self._slots[slot][: len(host)])

    def wait(self) -> None:
        """Until `tensors` may be read or written outside of `walk`."""
        self._lanes.wait()


class _Lanes:
    """The ways in and out: a CUDA stream each, and what each slot last saw; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._way_in, self._way_out = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else (None, None)
        )
        self._came: dict[int, torch.cuda.Event] = {}
        self._left: dict[int, torch.cuda.Event] = {}
        if self._way_in is not None:
            self._way_in.wait_stream(torch.cuda.current_stream(device))  # the slots' memory may be in use until then

    def bring(self, slot: int, into: Tensor, host: Tensor) -> None:
        """Begins to fill a slot, once what was in it has left."""
        if self._way_in is None:
            into.copy_(host)
            return
        with torch.cuda.stream(self._way_in):
            if slot in self._left:
                self._way_in.wait_event(self._left[slot])
            into.copy_(host, non_blocking=True)
            self._came[slot] = self._way_in.record_event()

    def arrived(self, slot: int) -> None:
        """Lets the current stream wait for a slot to be full."""
        if self._way_in is not None:
            torch.cuda.current_stream(self._way_in.device).wait_event(self._came[slot])

    def take_back(self, slot: int, host: Tensor, source: Tensor) -> None:
        """Begins to empty a slot, once the current stream is through with it."""
        if self._way_out is None:
            host.copy_(source)
            return
        self._way_out.wait_stream(torch.cuda.current_stream(self._way_out.device))
        with torch.cuda.stream(self._way_out):
            host.copy_(source, non_blocking=True)
            self._left[slot] = self._way_out.record_event()

    def wait(self) -> None:
        """Until all that left has arrived at the host."""
        if self._way_out is not None:
            self._way_out.synchronize()


def _chunks(layouts: Sequence[Layout], limit: int) -> Iterator[range]:
    """Neighbours together, up to `limit` bytes; a larger one alone."""
    start, filled = 0, 0
    for number, layout in enumerate(layouts):
        size = _size(layout)
        if number > start and filled + size > limit:
            yield range(start, number)
            start, filled = number, 0
        filled += size
    if start < len(layouts):
        yield range(start, len(layouts))


def _size(layout: Layout) -> int:
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in layout.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, layouts: Sequence[Layout]) -> list[Mapping[str, Tensor]]:
    """The tensors of some parameters, one after the other in flat memory."""
    found, place = [], 0
    for layout in layouts:
        views = {}
        for name, (shape, dtype) in layout.items():
            size = prod(shape) * dtype.itemsize
            views[name] = memory[place : place + size].view(dtype).view(shape)
            place += _aligned(size)
        found.append(views)
    return found
