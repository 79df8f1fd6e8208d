"""Frozen modules that take less memory than their weights: cut over ranks, or kept on the host between uses.

Both work unit by unit (a unit: one block of the module): the weights of one unit, and of the next on its way, are on
the device at a time. Results are those of the whole module, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from longtake.parallel.host import lay_out
from longtake.parallel.shard import local_tensor, own_part
from longtake.parallel.world import World


def frozen_mesh(world: World) -> DeviceMesh:
    """The ranks that hold a sharded frozen module together: those of a node, or all where nodes are not known.

    Weights are gathered block by block at every use, which the links inside a node carry and those between do not.
    Collective.
    """
    node = world.local_size or world.size
    if node == world.size or world.size % node:
        return init_device_mesh(world.device.type, (world.size,))
    nodes = init_device_mesh(world.device.type, (world.size // node, node), mesh_dim_names=("nodes", "frozen"))
    return nodes["frozen"]


def shard_frozen(module: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cuts the parameters of `module`, of each unit by itself, over the ranks of `mesh` (FSDP2), in place.

    Call it on the meta device, then `fill_frozen`. From then on each forward gathers one unit after the other, with
    the next under way, so all ranks of `mesh` must call the module equally often.
    """
    module.requires_grad_(False)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


class Turns:
    """Calls that the ranks of `mesh` must make together, where each has a number of its own to make.

    Every rank says `begin` before each of its calls and, once it has no more, `finish` with a call that stands in as
    often as others go on.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._device = mesh.get_group(), mesh.device_type

    def begin(self) -> None:
        """Of one call."""
        self._busy(1)

    def finish(self, stand_in: Callable[[], object]) -> None:
        """Returns when every rank has finished."""
        while self._busy(0):
            stand_in()

    def _busy(self, own: int) -> int:
        """How many ranks have a call to make."""
        count = torch.tensor(own, device=self._device)
        dist.all_reduce(count, group=self._group)
        return int(count)


@torch.no_grad()
def fill_frozen(module: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Materialises a module built on the meta device, sharded or not, and copies its weights into it.

    `weights` holds a tensor for each name of `module.state_dict()`, of any dtype, read one at a time. Buffers that are
    no part of the state are left empty.
    """
    module.to_empty(device=device)
    for name, tensor in module.state_dict().items():
        local_tensor(tensor).copy_(own_part(weights[name], tensor))
    module.requires_grad_(False).eval()


class HostWeights:
    """The weights of a module's units in the host's memory, pinned, which visit the device when their unit runs.

    Built from a module whose weights are on the CPU; everything outside the units moves to the device for good. Before
    a unit runs, its weights have been copied to one of two buffers of the largest unit's size; while it runs, those of
    the next one are copied to the other, on a stream of their own. After the last unit the buffers are freed. Units run
    in the given order at every forward. A module whose units are not run keeps nothing on the device for them.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        inside = {id(tensor) for unit in units for tensor in _tensors(unit)}
        for tensor in _tensors(module):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
        self._units = [_Unit(unit, pinned=on_cuda) for unit in units]
        self._largest = max(unit.host.numel() for unit in self._units)
        self._buffers: list[Tensor] = []
        self._copies = torch.cuda.Stream(device) if on_cuda else None
        self._ready = [torch.cuda.Event() for _ in units] if on_cuda else []
        self._done = [torch.cuda.Event() for _ in units] if on_cuda else []
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            unit.register_forward_hook(lambda *_, number=number: self._leave(number), always_call=True)

    @property
    def device_bytes(self) -> int:
        """What the buffers take on the device while the module runs."""
        return self._largest * min(2, len(self._units))

    def _enter(self, number: int) -> None:
        if number == 0:
            count = min(2, len(self._units))
            self._buffers = [torch.empty(self._largest, dtype=torch.uint8, device=self.device) for _ in range(count)]
            if self._copies is not None:  # whatever had this memory before may still be computing
                self._copies.wait_stream(torch.cuda.current_stream(self.device))
            self._fetch(0)
        assert self._buffers, "units run in order, from the first"
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready[number])
        self._units[number].point_to(self._buffers[number % 2])
        if number + 1 < len(self._units):
            self._fetch(number + 1)

    def _fetch(self, number: int) -> None:
        host = self._units[number].host
        buffer = self._buffers[number % 2][: host.numel()]
        if self._copies is None:
            buffer.copy_(host)
            return
        if number >= 2:  # the unit that had this buffer before
            self._copies.wait_event(self._done[number - 2])
        with torch.cuda.stream(self._copies):
            buffer.copy_(host, non_blocking=True)
            self._ready[number].record(self._copies)

    def _leave(self, number: int) -> None:
        self._units[number].point_to(self._units[number].host)
        if self._copies is not None:
            self._done[number].record(torch.cuda.current_stream(self.device))
        if number + 1 == len(self._units):
            self._buffers = []  # the stream that computes has waited for every copy: the memory is its own again


class _Unit:
    """One unit's parameters and buffers, laid end to end in one piece of host memory."""

    def __init__(self, unit: nn.Module, pinned: bool) -> None:
        self._tensors = list({id(tensor): tensor for tensor in _tensors(unit)}.values())
        self._places, total = lay_out([tensor.nbytes for tensor in self._tensors])
        self.host = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        with torch.no_grad():
            for tensor, view in zip(self._tensors, self._views(self.host), strict=True):
                view.copy_(tensor)
        self.point_to(self.host)

    def point_to(self, memory: Tensor) -> None:
        """Lets the unit's tensors lie in `memory`, which holds what `host` holds."""
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
    """Bytes of a frozen module on one device while it runs, at its worst moment.

    `unit_bytes`: of each unit, `rest_bytes`: of everything else, both whole. `placement`: "resident", "sharded" (over
    `ranks`: each unit's share, and two units gathered) or "offloaded" (two buffers of the largest unit).
    """
    largest = max(unit_bytes, default=0)
    if placement == "resident" or (placement == "sharded" and ranks == 1):
        return sum(unit_bytes) + rest_bytes
    if placement == "offloaded":
        return rest_bytes + largest * min(2, len(unit_bytes))
    shares = sum(-(-size // ranks) for size in unit_bytes) + -(-rest_bytes // ranks)
    return shares + max(2 * largest, largest + rest_bytes)
