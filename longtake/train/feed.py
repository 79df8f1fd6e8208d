"""The way of a batch from the loader to the device: reused pinned memory, a stream of its own, one batch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from longtake.data.loading.loader import Fetched
from longtake.data.loading.parcel import Parcel
from longtake.parallel.host import CopyStreams, host_memory

NUM_BUFFERS = 2  # the batch in training and the one ahead of it


class HostBuffers:
    """Host memory that copies to a device are made from: `NUM_BUFFERS` pieces at most, each as large as the largest
    batch known when it was made; reused for ever.

    Pinned where the device is a GPU, which a copy beside the trainer's kernels needs. Making one is slow, so each is
    made once, and again only for a batch that is larger than all before.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # With the last copy out of each, the earliest first.
        self._used: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._largest = 0

    def expect(self, num_bytes: int) -> None:
        """Announce the size of the largest batch to come: buffers made from now on are at least as large."""
        self._largest = max(self._largest, num_bytes)

    def send(self, parcel: Parcel, streams: CopyStreams) -> tuple[Parcel, torch.cuda.Event]:
        """Request the copy of a packed batch to the device, waiting for a buffer if need be; the parcel's own memory is
        free afterwards."""
        self.expect(len(parcel.data))
        data = torch.empty(0, dtype=torch.uint8)
        if self._used and (len(self._used) == NUM_BUFFERS or self._used[0][1].query()):
            data, copied = self._used.popleft()
            copied.synchronize()
        if len(data) < len(parcel.data):
            del data
            data, _ = host_memory(self._largest, self.device)  # not pinned: copies are slower
        staged = parcel.on(data)
        staged.data.copy_(parcel.data)
        sent, copied = streams.send(staged.data)
        self._used.append((data, copied))
        return parcel.on(sent), copied


class DeviceFeed:
    """Batches on the device, the next one being copied while this one is trained on.

    On the CPU they stay where the loader made them. On CUDA their bytes go through a pinned buffer, which is written
    again only after the copy out of it is done, and over a stream of their own.
    """

    def __init__(self, device: torch.device):
        self.buffers, self._streams = HostBuffers(device), CopyStreams(device) if device.type == "cuda" else None

    def parcels(self, fetched: Fetched) -> Iterator[tuple[Parcel, int]]:
        """Every batch of `fetched` in its order, with how many samples train: counted here, for counting on the device
        would wait for it."""
        if self._streams is None:
            while (parcel := fetched.parcel()) is not None:
                yield parcel, parcel.num_loaded
            return
        coming = self._send(fetched.parcel(), self._streams)
        while coming is not None:
            here, loaded, copied = coming
            self._streams.receive(here.data, copied)
            coming = self._send(fetched.parcel(), self._streams) if fetched.ready() else None
            handed = [(here, loaded)]
            del here  # whoever takes it may let go of it before it asks for the next one
            yield handed.pop()
            coming = coming or self._send(fetched.parcel(), self._streams)

    def _send(self, parcel: Parcel | None, streams: CopyStreams) -> tuple[Parcel, int, torch.cuda.Event] | None:
        if parcel is None:
            return None
        sent, copied = self.buffers.send(parcel, streams)
        return sent, parcel.num_loaded, copied
