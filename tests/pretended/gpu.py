"""Fake CUDA device backed by CPU tensors, which refuses what CUDA refuses.

What mixes devices raises as on a GPU, and what makes the host wait is written down. Numbers are real, so whole runs go
through, unlike under PyTorch's fake tensors. Not told: wrong use of streams, kernels that CUDA lacks or that differ,
and allocations.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from longtake.parallel import frozen

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
_CROSSING = (aten.copy_.default, aten._to_copy.default)
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_ALLOCATING = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default)
_NOT_DETERMINISTIC = {  # of what PyTorch's notes on `use_deterministic_algorithms` list, that which models might use
    getattr(aten, name).default
    for name in (
        *(f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
        *(f"replication_pad{dims}d_backward" for dims in (1, 2, 3)),
        "reflection_pad1d_backward",
        "reflection_pad3d_backward",
        "avg_pool3d_backward",
        "grid_sampler_3d_backward",
    )
}
_READING = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)

waits: list[str] = []  # where the host waited for the device: the stack


@dataclass
class Queue:
    """Requests of the host to the device so far."""

    launches: int = 0  # kernels and copies, as operations of PyTorch; views and allocations are none
    pageable: list[str] = field(default_factory=list)  # copies from or to host memory that is not pinned: the stack
    reads: list[tuple[int, int]] = field(default_factory=list)  # at each wait: launches by then, the last that is over
    not_deterministic: list[str] = field(default_factory=list)  # operations that give other bits each time

    def __post_init__(self) -> None:
        self.pinned: dict[int, int] = {}  # address of host memory -> bytes

    def pin(self, memory: Tensor) -> None:
        """Takes host memory as pinned for as long as it lives."""
        storage = memory.untyped_storage()
        self.pinned[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self.pinned.pop, storage.data_ptr(), None)

    def is_pinned(self, memory: Tensor) -> bool:
        start = memory.data_ptr()
        return any(place <= start < place + size for place, size in self.pinned.items())


queue = Queue()


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        facts = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        out = Tensor._make_wrapper_subclass(cls, held.shape, device=GPU, **facts)
        out.held = held
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, dict(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # lets modules exchange their parameters for such ones
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(parts: Mapping[str, Tensor], *_: Any) -> OnGpu:
        return OnGpu(parts["held"])

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        _wait()
        return self.held.tolist()


class _Intercept(TorchDispatchMode):
    """Takes operations that make tensors on the GPU out of nothing or of those of the CPU."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, dict(kwargs or {}))


def _run(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, whose results are on the device on which they would be."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(isinstance(x, DTensor) for x in tensors):
        return NotImplemented  # it knows what to do, and comes back with its local tensors
    here = [x for x in tensors if isinstance(x, OnGpu)]
    to_gpu = bool(here)
    if kwargs.get("device") is not None:
        to_gpu = torch.device(kwargs["device"]).type == "cuda"
        kwargs["device"] = CPU if to_gpu else kwargs["device"]
    elif operation is aten.copy_.default:
        to_gpu = isinstance(args[0], OnGpu)
    pins = kwargs.pop("pin_memory", None)
    if pins and to_gpu:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    _check_devices(operation, args, tensors, here)
    if (here and operation in _READING) or _waits_to_cross(operation, args, kwargs, to_gpu):
        _wait()
    own_args, own_kwargs = pytree.tree_map(lambda x: x.held if isinstance(x, OnGpu) else x, (tuple(args), kwargs))
    _count_launch(operation, args, to_gpu or bool(here))
    out = operation(*own_args, **own_kwargs)
    if operation is aten._to_copy.default and out is own_args[0]:
        out = out.clone()
    if not to_gpu:
        if pins:
            queue.pin(out)
        return args[0] if operation is aten.copy_.default else out
    known = {id(x.held): x for x in here}

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnGpu) or x.is_meta:
            return x
        return known[id(x)] if id(x) in known else OnGpu(x)

    out = pytree.tree_map(placed, out)
    is_view = operation.namespace == "aten" and here and any(a.alias_info for a in operation._schema.arguments)
    return return_and_correct_aliasing(operation, args, kwargs, out) if is_view else out


def _count_launch(operation: Any, args: Sequence[Any], on_gpu: bool) -> None:
    """Takes an operation down in the queue, if it is the device's."""
    if not on_gpu or operation in _ALLOCATING or operation.namespace != "aten":
        return
    if any(result.alias_info and not result.alias_info.is_write for result in operation._schema.returns):
        return
    queue.launches += 1
    if len(_streams) == 1:
        _streams[0].behind = queue.launches
    if operation in _NOT_DETERMINISTIC:
        queue.not_deterministic.append(str(operation))
    ends = args[:2] if operation is aten.copy_.default else args[:1]
    on_host = [x for x in ends if isinstance(x, Tensor) and not isinstance(x, OnGpu) and x.ndim]
    if operation in _CROSSING and on_host and not queue.is_pinned(on_host[0]):
        queue.pageable.append("".join(traceback.format_stack()))


def _check_devices(operation: Any, args: Sequence[Any], tensors: Sequence[Tensor], here: Sequence[OnGpu]) -> None:
    """Raises RuntimeError where CUDA would: numbers of the CPU may join where they are one, indices always."""
    if not here or operation in _CROSSING or operation.namespace == "c10d":
        return
    if operation in _INDEXING:  # indices may be on the CPU
        tensors = [x for i, x in enumerate(args) if i != 1 and isinstance(x, Tensor)]
    if any(x.device.type == "cpu" and x.ndim for x in tensors):
        found = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device, found {found}")


def _waits_to_cross(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], to_gpu: bool) -> bool:
    """Whether an operation copies to or from the host and waits for it; either way all work before it comes first."""
    if operation not in _CROSSING or kwargs.get("non_blocking") or True in args[2:]:
        return False
    source = args[1] if operation is aten.copy_.default else args[0]
    return isinstance(source, OnGpu) != to_gpu


def _wait() -> None:
    waits.append("".join(traceback.format_stack()))
    queue.reads.append((queue.launches, queue.launches))


class _Stream:
    """A stream that knows the number of the last launch in the main stream that its next operation comes after."""

    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None:
        self.behind = 0

    def wait_stream(self, stream: _Stream) -> None:
        self.behind = max(self.behind, stream.behind)

    def wait_event(self, event: _Event) -> None:
        self.behind = max(self.behind, event.behind)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        queue.reads.append((queue.launches, self.behind))


_streams = [_Stream()]  # the first is the main one, the last is current


@contextmanager
def _using(stream: _Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    _streams.append(stream or _streams[-1])
    try:
        yield
    finally:
        _streams.pop()


class _Event:
    """Over as soon as it is recorded; it remembers which launches come before it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.behind = 0

    def record(self, stream: _Stream | None = None) -> None:
        self.behind = (stream or _streams[-1]).behind

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _streams[-1]).wait_event(self)

    def synchronize(self) -> None:
        queue.reads.append((queue.launches, self.behind))

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 100.0


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, there is one GPU, of Hopper's generation. `device.cpp` must have been loaded before PyTorch was."""

    def register(place: int, size: int, flags: int) -> int:
        queue.pinned[place] = size
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda place: queue.pinned.pop(place, None) and 0
    )
    facts = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "device": nullcontext(),
        "synchronize": None,
        "empty_cache": None,
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (60 << 30, 80 << 30),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "_sleep": None,
        "cudart": runtime,
    }
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` begins on the CPU
    try:
        with ExitStack() as stack:
            for name, value in facts.items():
                stack.enter_context(patch.object(torch.cuda, name, _returning(value)))
            stack.enter_context(patch.multiple(torch.cuda, Stream=_Stream, Event=_Event, stream=_using))
            stack.enter_context(patch.object(torch.cuda, "current_stream", lambda *_: _streams[-1]))
            stack.enter_context(
                patch.multiple(_fsdp_param, free_storage=_returning(None), alloc_storage=_returning(None))
            )
            stack.enter_context(patch.object(Tensor, "pin_memory", _pin))
            stack.enter_context(
                patch.object(Tensor, "is_pinned", lambda self: not isinstance(self, OnGpu) and queue.is_pinned(self))
            )
            stack.enter_context(patch.object(Tensor, "record_stream", _returning(None)))
            stack.enter_context(patch.multiple(frozen._HostBlock, __init__=_host_block, point_to=_point_to))
            stack.enter_context(patch.object(frozen.HostWeights, "__init__", _host_weights))
            stack.enter_context(_Intercept())
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


_make_block, _make_weights = frozen._HostBlock.__init__, frozen.HostWeights.__init__


def _put(module: nn.Module, moved: Mapping[int, Tensor]) -> None:
    """Exchanges tensors of a module, named by their `id`: the `data` of a tensor on the CPU takes none of the GPU."""
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if id(tensor) in moved:
                    new = moved[id(tensor)]
                    tensors[name] = nn.Parameter(new, requires_grad=False) if tensors is owner._parameters else new


def _host_block(block: Any, unit: nn.Module, device: torch.device) -> None:
    block.unit, block.now = unit, None
    _make_block(block, unit, device)


def _point_to(block: Any, memory: Tensor) -> None:
    """`_HostBlock.point_to` by new parameters."""
    now = block.now or block._tensors
    _put(block.unit, dict(zip(map(id, now), block._views(memory), strict=True)))
    block.now = list({id(tensor): tensor for tensor in frozen._tensors(block.unit)}.values())


def _host_weights(weights: Any, module: nn.Module, units: Sequence[nn.Module], device: torch.device) -> None:
    inside = {id(tensor) for unit in units for tensor in frozen._tensors(unit)}
    outside = [tensor for tensor in frozen._tensors(module) if id(tensor) not in inside]
    _put(module, {id(tensor): tensor.detach().to(device) for tensor in outside})
    _make_weights(weights, module, units, device)


def _pin(tensor: Tensor) -> Tensor:
    if isinstance(tensor, OnGpu):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    copied = tensor.clone()
    queue.pin(copied)
    return copied
