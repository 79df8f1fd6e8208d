"""The way of a batch from the loader to the device: reused pinned memory, a stream of its own, one batch ahead."""

from __future__ import annotations

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


@dataclass(eq=False)
class HostBuffer:
    """Host memory that is lent out for one copy at a time."""

    data: Tensor  # uint8 [num_bytes]
    lent: bool = False
    copied: Done | None = None  # the last copy out of it

    @property
    def free(self) -> bool:
        return not self.lent and (self.copied is None or self.copied.query())


class HostBuffers:
    """`limit` buffers at most, each as large as the largest batch known when it was made; reused for ever.

    `pin`: page-locked, which a copy beside the trainer's kernels needs. Making one is slow, so each is made once, and
    again only for a batch that is larger than all before.
    """

    def __init__(self, limit: int = NUM_BUFFERS, pin: bool = True):
        self.limit, self.pin = limit, pin
        self._buffers: list[HostBuffer] = []
        self._largest = 0

    @property
    def num_bytes(self) -> int:
        """What all buffers take together."""
        return sum(len(buffer.data) for buffer in self._buffers)

    def expect(self, num_bytes: int) -> None:
        """Announces how large batches will become: buffers made from now on are at least as large."""
        self._largest = max(self._largest, num_bytes)

    def take(self, num_bytes: int) -> HostBuffer:
        """Lends out a buffer of at least `num_bytes`, waiting if need be. `AssertionError`: all are lent out."""
        self.expect(num_bytes)
        free = sorted((buffer for buffer in self._buffers if buffer.free), key=lambda buffer: len(buffer.data))
        found = next((buffer for buffer in free if len(buffer.data) >= num_bytes), None)
        if found is None and len(self._buffers) >= self.limit:  # one too small makes way, or the largest is waited for
            unlent = [buffer for buffer in self._buffers if not buffer.lent]
            assert unlent, "every buffer is lent out"
            found = free[0] if free else max(unlent, key=lambda buffer: len(buffer.data))
            if not found.free and found.copied is not None:
                found.copied.synchronize()
            if len(found.data) < num_bytes:
                self._buffers.remove(found)
                found = None
        if found is None:
            found = HostBuffer(torch.empty(self._largest, dtype=torch.uint8, pin_memory=self.pin))
            self._buffers.append(found)
        found.lent = True
        return found

    def give_back(self, buffer: HostBuffer, copied: Done | None) -> None:
        """Takes a buffer back; it is lent out again once `copied` is over (None: at once)."""
        assert buffer.lent
        buffer.lent, buffer.copied = False, copied


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


@dataclass(frozen=True)
class _OnItsWay:
    """A parcel whose copy to the device has been asked for."""

    parcel: Parcel
    loaded: int
    copied: Done


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
            here, loaded = coming.parcel, coming.loaded
            self._lane.receive(here.data, coming.copied)
            coming = self._send(fetched.parcel(), self._lane) if fetched.ready() else None
            handed = [(here, loaded)]
            del here  # whoever takes it may let go of it before it asks for the next one
            yield handed.pop()
            coming = coming or self._send(fetched.parcel(), self._lane)

    def _send(self, parcel: Parcel | None, lane: Lane) -> _OnItsWay | None:
        """Asks for the copy of a parcel to the device; its own memory is free afterwards."""
        if parcel is None:
            return None
        buffer = self.buffers.take(len(parcel.data))
        staged = parcel.on(buffer.data)
        staged.data.copy_(parcel.data)
        sent, copied = lane.send(staged.data)
        self.buffers.give_back(buffer, copied)
        return _OnItsWay(parcel.on(sent), _num_loaded(parcel.batch), copied)


def _num_loaded(batch: Batch) -> int:
    return int(batch.weights.count_nonzero())
