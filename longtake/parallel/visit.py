"""Weights that are on the device for a phase of work, and with the host while others need its memory."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longtake.parallel.host import lay_out, pin, unpin
from longtake.parallel.shard import local_tensor


class VisitingWeights:
    """The weights of a module, sharded or not, which `leave` the device and `come` back, as often as need be.

    Built from a module that is there; it then leaves. They must not change while they are there: they are copied to the
    host once, into one piece of pinned memory, and what leaves later is thrown away. Tensors stay the same objects,
    only the memory under them goes, so whatever else looks at it (FSDP's flat views) sees it come back. What is not on
    `device` (`parallel.cpu_offload`) stays where it is.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.is_here = True
        self._module = module
        self._reshard()
        tensors = [local_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == device.type}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        places, total = lay_out([storage.nbytes() for storage in self._storages])
        memory = torch.empty(total, dtype=torch.uint8)
        if self._storages and device.type == "cuda" and pin(memory):  # where it may not, copies are slower
            weakref.finalize(self, unpin, memory.data_ptr()).atexit = False
        self._host = [memory[place] for place in places]
        for host, storage in zip(self._host, self._storages, strict=True):
            host.copy_(_as_bytes(storage), non_blocking=True)
        self.leave()

    @property
    def num_bytes(self) -> int:
        """What leaves and comes back."""
        return sum(host.nbytes for host in self._host)

    def come(self) -> None:
        """Back to the device, before whatever is computed next; the host waits for nothing."""
        if self.is_here:
            return
        for host, storage in zip(self._host, self._storages, strict=True):
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        self.is_here = True

    def leave(self) -> None:
        """Frees the device's memory once all that was started before is computed."""
        if not self.is_here:
            return
        self._reshard()
        for storage in self._storages:
            storage.resize_(0)
        self.is_here = False

    def _reshard(self) -> None:
        """Frees what was gathered and kept (`parallel.zero = 2`)."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
