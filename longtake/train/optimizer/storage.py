"""Storage of tensors that are needed once per step: on the device, or in host memory.

Moments kept by the host pass through the device, a chunk at a time, and are updated there: the next chunk comes in and
the last one goes out while one is updated. So the update is the same, bit by bit, wherever its tensors live, a step
that is left out is known to the device alone, and nothing waits. (torchao's CPUOffloadOptimizer updates on the CPU,
which must wait for the gradient's norm, knows of no step that is left out, and moves as many bytes through slower
memory.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from longtake.chunks import chunked
from longtake.parallel.host import CopyStreams, host_memory, lay_out

CHUNK_BYTES = 128 << 20  # long enough that a copy runs at full speed; `SLOTS` of them lie on the device
SLOTS = 3  # one comes in, one is updated, one goes out

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
        """Wait until `tensors` may be read or written outside of `walk`."""

    @property
    def on_device(self) -> list[Tensor]:
        """Tensors that stay on the device between steps."""
        return [tensor for own in self.tensors for tensor in own.values()]


class OnHost:
    """Tensors, zero at first, in (pinned) host memory. On a CPU it is all plain copies."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device, chunk_bytes: int | None = None) -> None:
        """`chunk_bytes`: what passes through the device at once; None: `CHUNK_BYTES`."""
        each = [lay_out(_sizes([layout]))[1] for layout in layouts]
        chunks = list(chunked(each, CHUNK_BYTES if chunk_bytes is None else chunk_bytes))
        sizes = [lay_out(_sizes([layouts[i] for i in chunk]))[1] for chunk in chunks]
        self._hosts = [host_memory(size, device, self, zeros=True)[0] for size in sizes]  # not pinned: only slower
        room = max(sizes, default=0)
        self._slots = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, len(chunks)))]
        self.tensors: list[Mapping[str, Tensor]] = []
        self._passes: list[Pass] = []
        for number, chunk in enumerate(chunks):
            mine = [layouts[i] for i in chunk]
            self.tensors += _views(self._hosts[number], mine)
            self._passes.append((chunk, _views(self._slots[number % SLOTS], mine)))
        self._streams = CopyStreams(device)

    def walk(self) -> Iterator[Pass]:
        """Yield the tensors on the device, chunk by chunk, to be read and changed there."""
        for number in range(len(self._passes) + 1):
            if number < len(self._passes):
                host = self._hosts[number]
                self._streams.to_device(number % SLOTS, self._slots[number % SLOTS][: len(host)], host)
            if number > 0:  # one ahead is on its way by now
                slot, host = (number - 1) % SLOTS, self._hosts[number - 1]
                self._streams.wait_to_device(slot)
                yield self._passes[number - 1]
                self._streams.to_host(slot, host, self._slots[slot][: len(host)])

    def wait(self) -> None:
        """Wait until `tensors` may be read or written outside of `walk`."""
        self._streams.wait()

    @property
    def on_device(self) -> list[Tensor]:
        """Nothing: the slots hold no numbers between steps, and the same memory is used by later ones."""
        return []


def _sizes(layouts: Sequence[Layout]) -> list[int]:
    return [prod(shape) * dtype.itemsize for layout in layouts for shape, dtype in layout.values()]


def _views(memory: Tensor, layouts: Sequence[Layout]) -> list[Mapping[str, Tensor]]:
    """Return the tensors of some parameters, one after the other in flat memory."""
    places = iter(lay_out(_sizes(layouts))[0])
    return [
        {name: memory[next(places)].view(dtype).view(shape) for name, (shape, dtype) in layout.items()}
        for layout in layouts
    ]
