"""Frozen modules whose weights are sharded over ranks or offloaded to host memory.

Both work unit by unit (usually a block): only the current unit's weights and the prefetched next one's are on the
device. Results are bit for bit those of the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake.parallel.host import CopyStreams, host_memory, lay_out
from longtake.parallel.shard import local_tensor, own_part
from longtake.parallel.world import World


def frozen_mesh(world: World) -> DeviceMesh:
    """Return the ranks that a frozen module is sharded over: those of a node (all, where nodes are unknown), since
    gathering weights at every use is too slow between nodes. Collective."""
    node = world.node_size
    if node == world.size or world.size % node:
        return init_device_mesh(world.device.type, (world.size,))
    nodes = init_device_mesh(world.device.type, (world.size // node, node), mesh_dim_names=("nodes", "frozen"))
    return nodes["frozen"]


def shard_frozen(module: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard `module` over the ranks of `mesh` (FSDP2, unit by unit), in place.

    Call it on the meta device, then `fill_frozen`. Each forward gathers weights, so all ranks of `mesh` must call the
    module equally often.
    """
    from torch.distributed.fsdp import fully_shard

    module.requires_grad_(False)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


class SynchronisedCalls:
    """Keeps collective calls of the ranks of `mesh` in step where the ranks make different numbers of them.

    A rank calls `begin` before each of its calls and, after the last, `finish`, which repeats a stand-in for as long as
    other ranks go on.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._device = mesh.get_group(), mesh.device_type

    def begin(self) -> None:
        """Announce one call."""
        self._busy(1)

    def finish(self, stand_in: Callable[[], object]) -> None:
        """Return when every rank has finished."""
        while self._busy(0):
            stand_in()

    def _busy(self, own: int) -> int:
        """Return the number of ranks that have a call to make."""
        count = torch.tensor(own, device=self._device)
        dist.all_reduce(count, group=self._group)
        return int(count)


@torch.no_grad()
def fill_frozen(module: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Materialise a module built on the meta device, sharded or not, and copy its weights into it.

    `weights` holds a tensor for each name of `module.state_dict()`, of any dtype, read one at a time. Buffers that are
    no part of the state are left empty.
    """
    module.to_empty(device=device)
    for name, tensor in module.state_dict().items():
        local_tensor(tensor).copy_(own_part(weights[name], tensor))
    module.requires_grad_(False).eval()


class HostWeights:
    """A module's weights in pinned host memory, copied to the device unit by unit as they are needed.

    Built from a module on the CPU; everything outside the units moves to the device for good. There are two device
    buffers of the largest unit's size: while a unit runs from one, the next unit's weights are copied to the other on a
    separate stream. Both are freed after the last unit. Units run in the given order at every forward.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        inside = {id(tensor) for unit in units for tensor in _tensors(unit)}
        for tensor in _tensors(module):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        self._units = [_HostBlock(unit, device) for unit in units]
        self._largest = max(unit.host.numel() for unit in self._units)
        self._buffers: list[Tensor] = []
        self._streams = CopyStreams(device)
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            unit.register_forward_hook(lambda *_, number=number: self._leave(number), always_call=True)

    def _enter(self, number: int) -> None:
        if number == 0:
            count = min(2, len(self._units))
            self._buffers = [torch.empty(self._largest, dtype=torch.uint8, device=self.device) for _ in range(count)]
            self._streams.begin()
            self._fetch(0)
        assert self._buffers, "units run in order, from the first"
        self._streams.wait_to_device(number % 2)
        self._units[number].point_to(self._buffers[number % 2])
        if number + 1 < len(self._units):
            self._fetch(number + 1)

    def _fetch(self, number: int) -> None:
        host = self._units[number].host
        self._streams.to_device(number % 2, self._buffers[number % 2][: host.numel()], host)

    def _leave(self, number: int) -> None:
        self._units[number].point_to(self._units[number].host)
        self._streams.release(number % 2)
        if number + 1 == len(self._units):
            self._buffers = []  # the stream that computes has waited for every copy: the memory is its own again


class _HostBlock:
    """One unit's parameters and buffers in one contiguous piece of host memory."""

    def __init__(self, unit: nn.Module, device: torch.device) -> None:
        self._tensors = list({id(tensor): tensor for tensor in _tensors(unit)}.values())
        self._places, total = lay_out([tensor.nbytes for tensor in self._tensors])
        self.host, _ = host_memory(total, device, self)
        with torch.no_grad():
            for tensor, view in zip(self._tensors, self._views(self.host), strict=True):
                view.copy_(tensor)
        self.point_to(self.host)

    def point_to(self, memory: Tensor) -> None:
        """Make the unit's tensors views of `memory`, a copy of `host`."""
        for tensor, view in zip(self._tensors, self._views(memory), strict=True):
            tensor.data = view

    def _views(self, memory: Tensor) -> list[Tensor]:
        return [
            memory[place].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(self._tensors, self._places, strict=True)
        ]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def frozen_bytes(unit_bytes: Sequence[int], rest_bytes: int, placement: str, ranks: int) -> int:
    """Peak bytes of a frozen module's weights on one device.

    `unit_bytes`: of each unit, `rest_bytes`: of everything else, both unsharded. `placement`: "resident", "sharded"
    (over `ranks`, with two units gathered) or "offloaded" (two buffers of the largest unit).
    """
    largest = max(unit_bytes, default=0)
    if placement == "resident" or (placement == "sharded" and ranks == 1):
        return sum(unit_bytes) + rest_bytes
    if placement == "offloaded":
        return rest_bytes + largest * min(2, len(unit_bytes))
    shares = sum(-(-size // ranks) for size in unit_bytes) + -(-rest_bytes // ranks)
    return shares + max(2 * largest, largest + rest_bytes)
