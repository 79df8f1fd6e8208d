"""A process's use of its host: threads, pinned memory, and copies between host and device."""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT_BYTES = 1 << 30
_ALIGNMENT = 256  # bytes; where CUDA's own allocations begin


def tune_host(threads: int | None) -> None:
    """Set the number of compute threads, and lets glibc keep up to 1 GiB of freed memory.

    By default it returns every large tensor to the system when it is freed: 3.6 times as many page faults, and 8 % of
    the speed, in training a small model on a CPU.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def lay_out(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Lay out tensors of these sizes in one contiguous buffer: the range of each, and the buffer's bytes."""
    places, total = [], 0
    for size in sizes:
        places.append(slice(total, total + size))
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, max(1, total)


def host_memory(num_bytes: int, device: torch.device, owner: object = None, zeros: bool = False) -> tuple[Tensor, bool]:
    """Host memory for copies from and to `device`, and whether such copies are asynchronous.

    They are on a GPU where the memory could be pinned, which lasts as long as `owner` lives (None: the tensor itself);
    True on a CPU.
    """
    memory = (torch.zeros if zeros else torch.empty)(num_bytes, dtype=torch.uint8)
    if device.type != "cuda" or not num_bytes:
        return memory, True
    pinned = pin(memory)
    if pinned:
        weakref.finalize(memory if owner is None else owner, unpin, memory.data_ptr()).atexit = False
    return memory, pinned


def pin(memory: Tensor) -> bool:
    """Pin a buffer until `unpin`; return whether CUDA allows it. PyTorch's own pinning rounds up to a power of 2."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # clears CUDA's error state, which the next kernel would report
        torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()  # raises what was no refusal to pin, such as an earlier kernel's illegal access
    return False


def unpin(place: int) -> None:
    """Unpin memory at this address."""
    torch.cuda.cudart().cudaHostUnregister(place)


def pinned_like(numbers: Tensor) -> Tensor:
    """Return a little host memory for one copy of a device's numbers, from PyTorch's cache of pinned blocks.

    Blocks are powers of 2, and reused at once: right for what is copied in every step, wasteful for `host_memory`.
    """
    return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)


class CopyStreams:
    """Asynchronous copies between the host and a device: a CUDA stream each way, plain copies on a CPU.

    Each place (a buffer on the device) is filled, used by the current stream, and released or copied back; the host is
    never blocked. `send` and `receive` are for memory that is made for one copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, on_cuda = device, device.type == "cuda"
        self._to_device, self._to_host = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device)) if on_cuda else (None, None)
        )
        self._filled: dict[int, torch.cuda.Event] = {}
        self._freed: dict[int, torch.cuda.Event] = {}
        self.begin()

    def begin(self) -> None:
        """Wait for the current stream after buffers are newly allocated: kernels that used their memory before may
        still be running."""
        if self._to_device is not None:
            self._to_device.wait_stream(torch.cuda.current_stream(self._device))

    def to_device(self, place: int, into: Tensor, host: Tensor) -> None:
        """Start to fill a place, once its last contents are released."""
        if self._to_device is None:
            into.copy_(host)
            return
        with torch.cuda.stream(self._to_device):
            if place in self._freed:
                self._to_device.wait_event(self._freed[place])
            into.copy_(host, non_blocking=True)
            self._filled[place] = self._to_device.record_event()

    def wait_to_device(self, place: int) -> None:
        """Make the current stream wait until a place is filled."""
        if self._to_device is not None:
            torch.cuda.current_stream(self._device).wait_event(self._filled[place])

    def release(self, place: int) -> None:
        """Release a buffer once the current stream has finished with it."""
        if self._to_device is not None:
            self._freed[place] = torch.cuda.current_stream(self._device).record_event()

    def to_host(self, place: int, host: Tensor, source: Tensor) -> None:
        """Start to copy a place back, once the current stream has finished with it."""
        if self._to_host is None:
            host.copy_(source)
            return
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            host.copy_(source, non_blocking=True)
            self._freed[place] = self._to_host.record_event()

    def wait_to_host(self, place: int) -> None:
        """Make the current stream wait until a place is copied back, so that its memory may be freed."""
        if self._to_host is not None:
            torch.cuda.current_stream(self._device).wait_event(self._freed[place])

    def wait(self) -> None:
        """Blocks until all copies to the host are done."""
        if self._to_host is not None:
            self._to_host.synchronize()

    def send(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start a copy into new memory on the GPU; `host` must not change until the event behind it."""
        with torch.cuda.stream(self._to_device):
            return host.to(self._device, non_blocking=True), self._to_device.record_event()

    def receive(self, sent: Tensor, copied: torch.cuda.Event) -> None:
        """Make such memory safe to use by the current stream from here on, without blocking.

        It is marked as used by that stream: the allocator, which knows it as the way in's, would else give it to the
        next copy while a kernel still reads it.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        sent.record_stream(stream)
