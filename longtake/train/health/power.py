"""Power of the GPUs of each node, by the drivers' energy counters; it travels in a step's sums."""

from __future__ import annotations

import ctypes
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtake.parallel.world import World


class NodePower:
    """The mean draw of a GPU of each node, in watts. All ranks make one together."""

    def __init__(self, world: World, every: int) -> None:
        """`every`: steps between two readings; on a CPU there are none."""
        hosts = world.gather(socket.gethostname()) if world.device.type == "cuda" else []
        self.nodes, self._every = list(dict.fromkeys(hosts)), every
        if hosts:
            own = hosts[world.rank]
            self._place, self._peers = self.nodes.index(own), hosts.count(own)
            self._energy = GpuEnergy(world.device)

    def put(self, watts: Tensor, step: int) -> None:
        """Add this rank's part to `watts` [N], of each node, where step number `step` is one of those that have it."""
        if self.nodes and step % self._every == 0:
            watts[self._place].fill_(self._energy.watts() / self._peers)


class GpuEnergy:
    """The draw of one GPU, by NVML's counter of energy (Volta and later), which waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._nvml, self._handle = None, ctypes.c_void_p()
        self._before: tuple[float, float] | None = None
        with suppress(OSError, AttributeError, RuntimeError, AssertionError):
            nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0:
                self._nvml = nvml

    def watts(self) -> float:
        """Return the mean since the call before; 0 at first, and where nothing is known."""
        counter = ctypes.c_ulonglong()  # millijoules since the driver was loaded
        if self._nvml is None:
            return 0.0
        if self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(counter)) != 0:
            return 0.0
        now, before = (time.monotonic(), counter.value / 1000), self._before
        self._before = now
        return 0.0 if before is None or now[0] <= before[0] else max(0.0, now[1] - before[1]) / (now[0] - before[0])
