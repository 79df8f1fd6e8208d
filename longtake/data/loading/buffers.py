"""The way of a batch from the loader to the device: reused pinned memory, a stream of its own, one batch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longtake.contracts import Batch
from longtake.data.loading.loader import Fetched
from longtake.data.loading.parcel import Parcel

NUM_BUFFERS = 2  # the batch in training and the one ahead of it


@dataclass(frozen=True)
class Delivery:
    """A batch where the trainer wants it."""

    batch: Batch
    loaded: int  # samples that train, counted on the CPU: counting on the device would wait for it


class Done(Protocol):
    """What tells whether a copy is over: a `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Lane(Protocol):
    """A way to the device beside the trainer's own work."""

    def send(self, staged: Tensor) -> tuple[Tensor, Done]:
        """Asks for a copy of pinned bytes; they must not change until it is done."""

    def receive(self, sent: Tensor, copied: Done) -> None:
        """Makes the copy safe to use in the trainer's work from here on, without waiting for it."""


class CudaLane:
    """A stream of its own.

    The trainer's stream waits for the event behind the copy. The bytes are marked as used by that stream: the
    allocator, which knows them as this stream's, would else give them to the next copy while a kernel still reads them.
    """

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.Stream(device)

    def send(self, staged: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            sent = staged.to(self.device, non_blocking=True)
            copied.record()
        return sent, copied

    def receive(self, sent: Tensor, copied: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)
        sent.record_stream(stream)


class HostBuffers:
    """Host memory that copies to a device are made from: `NUM_BUFFERS` pieces at most, each as large as the largest
    batch known when it was made; reused for ever.

    `pin`: page-locked, which a copy beside the trainer's kernels needs. Making one is slow, so each is made once, and
    again only for a batch that is larger than all before.
    """

    def __init__(self, pin: bool = True):
        self.pin = pin
        self._used: deque[tuple[Tensor, Done]] = deque()  # with the last copy out of each, the earliest first
        self._largest = 0

    @property
    def num_bytes(self) -> int:
        """What all buffers take together."""
        return sum(len(data) for data, _ in self._used)

    def expect(self, num_bytes: int) -> None:
        """Announces how large batches will become: buffers made from now on are at least as large."""
        self._largest = max(self._largest, num_bytes)

    def send(self, parcel: Parcel, lane: Lane) -> tuple[Parcel, Done]:
        """Asks for the copy of a parcel to the device, waiting for a buffer if need be; the parcel's own memory is
        free afterwards."""
        self.expect(len(parcel.data))
        data = torch.empty(0, dtype=torch.uint8)
        if self._used and (len(self._used) == NUM_BUFFERS or self._used[0][1].query()):
            data, copied = self._used.popleft()
            copied.synchronize()
        if len(data) < len(parcel.data):
            del data
            data = torch.empty(self._largest, dtype=torch.uint8, pin_memory=self.pin)
        staged = parcel.on(data)
        staged.data.copy_(parcel.data)
        sent, copied = lane.send(staged.data)
        self._used.append((data, copied))
        return parcel.on(sent), copied


class DeviceFeed:
    """Batches on the device, the next one being copied while this one is trained on.

    On the CPU batches pass as they are. On CUDA their bytes go through a pinned buffer, which is written again only
    after the copy out of it is done, and through a lane of their own.
    """

    def __init__(self, lane: Lane | None, pin: bool = True):
        self._lane, self.buffers = lane, HostBuffers(pin=pin)

    @classmethod
    def to(cls, device: torch.device) -> DeviceFeed:
        """The feed of a device."""
        return cls(CudaLane(device) if device.type == "cuda" else None)

    def batches(self, fetched: Fetched) -> Iterator[Delivery]:
        """Every batch of `fetched` in its order."""
        if self._lane is None:
            return (Delivery(batch, _num_loaded(batch)) for batch in fetched)
        return (Delivery(parcel.batch, loaded) for parcel, loaded in self.parcels(fetched))

    def parcels(self, fetched: Fetched) -> Iterator[tuple[Parcel, int]]:
        """The same in one stretch of bytes each, with the number of samples that train."""
        if self._lane is None:
            while (parcel := fetched.parcel()) is not None:
                yield parcel, _num_loaded(parcel.batch)
            return
        coming = self._send(fetched.parcel(), self._lane)
        while coming is not None:
            here, loaded, copied = coming
            self._lane.receive(here.data, copied)
            coming = self._send(fetched.parcel(), self._lane) if fetched.ready() else None
            handed = [(here, loaded)]
            del here  # whoever takes it may let go of it before it asks for the next one
            yield handed.pop()
            coming = coming or self._send(fetched.parcel(), self._lane)

    def _send(self, parcel: Parcel | None, lane: Lane) -> tuple[Parcel, int, Done] | None:
        if parcel is None:
            return None
        sent, copied = self.buffers.send(parcel, lane)
        return sent, _num_loaded(parcel.batch), copied


def _num_loaded(batch: Batch) -> int:
    return int(batch.weights.count_nonzero())
