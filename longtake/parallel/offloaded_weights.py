"""Tensors offloaded to host memory between phases of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longtake.parallel.host import host_memory, lay_out
from longtake.parallel.shard import local_tensor


class OffloadedTensors:
    """Tensors of a device, sharded or not: `load` brings them there, `offload` frees its memory again.

    Built from tensors on the device, which are then offloaded. They must not change: they are copied to pinned host
    memory once, and `offload` discards the device's copy. Tensors stay the same objects, only their storage is
    resized, so views of it (FSDP's flat ones) stay valid. Tensors that are not on `device` (`parallel.cpu_offload`) are
    left alone.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.on_device = True
        own = [local_tensor(tensor) for tensor in tensors]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in own if t.device.type == device.type}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        places, total = lay_out([storage.nbytes() for storage in self._storages])
        memory, _ = host_memory(total if self._storages else 0, device, self)  # not pinned: copies are slower
        self._host = [memory[place] for place in places]
        for host, storage in zip(self._host, self._storages, strict=True):
            host.copy_(_as_bytes(storage), non_blocking=True)
        self.offload()

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded."""
        return sum(host.nbytes for host in self._host)

    def load(self) -> None:
        """Copy the tensors to the device, ahead of the next computation on it, without blocking the host."""
        if self.on_device:
            return
        for host, storage in zip(self._host, self._storages, strict=True):
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        self.on_device = True

    def offload(self) -> None:
        """Free the device's memory, after all computation queued before."""
        if not self.on_device:
            return
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False


class OffloadedWeights(OffloadedTensors):
    """The weights and buffers of a module, and what of them `parallel.zero = 2` keeps gathered."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._reshard()
        super().__init__((*module.parameters(), *module.buffers()), device)

    def offload(self) -> None:
        if self.on_device:
            self._reshard()
        super().offload()

    def _reshard(self) -> None:
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


@contextmanager
def offloaded(tensors: OffloadedTensors) -> Iterator[OffloadedTensors]:
    """Load the tensors, which may be offloaded inside the context, back to the device at its end, bit by bit as
    before."""
    try:
        yield tensors
    finally:
        tensors.load()
        for device in {storage.device for storage in tensors._storages if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the host's memory may go from here on


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
