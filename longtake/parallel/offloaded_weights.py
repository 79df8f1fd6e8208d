"""Weights offloaded to host memory between phases of work."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longtake.parallel.host import host_memory, lay_out
from longtake.parallel.shard import local_tensor


class OffloadedWeights:
    """The weights of a module, sharded or not: `load` brings them to the device, `offload` frees its memory again.

    Built from a module on the device, which is then offloaded. The weights must not change: they are copied to pinned
    host memory once, and `offload` discards the device's copy. Tensors stay the same objects, only their storage is
    resized, so views of it (FSDP's flat ones) stay valid. Tensors that are not on `device` (`parallel.cpu_offload`) are
    left alone.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.on_device = True
        self._module = module
        self._reshard()
        tensors = [local_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == device.type}
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
        """Copies the weights to the device, ahead of the next computation on it, without blocking the host."""
        if self.on_device:
            return
        for host, storage in zip(self._host, self._storages, strict=True):
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        self.on_device = True

    def offload(self) -> None:
        """Frees the device's memory, after all computation queued before."""
        if not self.on_device:
            return
        self._reshard()
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False

    def _reshard(self) -> None:
        """Frees gathered weights that `parallel.zero = 2` keeps."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
