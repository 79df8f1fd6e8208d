"""Offloading of activations: inputs of recomputed blocks, and outputs that these keep, are in host memory until
backward, up to a limit.

On CUDA they are copied on separate streams while the next block computes, and prefetched one block before they are
needed. The memory is one pinned buffer, allocated at first use and reused in every step. What does not fit stays on the
device. On a CPU the copies are plain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.parallel.host import CopyStreams, host_memory

_LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy
_ALIGNMENT = 512


class BlockStore:
    """Offloads tensors that blocks keep for backward, and brings them back."""

    def __init__(self, num_bytes: int, least_bytes: int = _LEAST_BYTES) -> None:
        self.room = Room(num_bytes)
        self._least_bytes = least_bytes
        self._memory: Tensor | None = None
        self._streams: CopyStreams | None = None
        self._now: weakref.ref[_Call] | None = None  # of the block that ran last
        self._leaving: list[_StoredTensor] = []  # of the last block: still on the device while they are copied

    def takes(
        self, args: Iterable[Any], given: Iterable[Tensor] | None = None
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside `with`, tensors of at least `least_bytes` that autograd saves are offloaded: those among `args` that
        need gradients, and with `given` (the inputs, weights and buffers of a compiled block) all that is not among
        these, which compiled code has made.

        One call per block, in the order of the forward; backward prefetches in reverse.
        """
        for piece in self._leaving:
            piece.leave()
        self._leaving = []
        call = _Call(self._now)
        self._now = weakref.ref(call)
        chosen = {
            arg.untyped_storage()._cdata
            for arg in args
            if isinstance(arg, Tensor) and arg.requires_grad and arg.is_contiguous() and arg.nbytes >= self._least_bytes
        }
        others = None if given is None else {tensor.untyped_storage()._cdata for tensor in given} - chosen
        put = partial(self._put_chosen, call, chosen, others)
        return torch.autograd.graph.saved_tensors_hooks(put, back)

    def keep(self, tensor: Tensor) -> Tensor | _StoredTensor:
        """Offload a tensor that the running block has made and saves, where it is large; `back` returns it."""
        call = self._now and self._now()
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        if call is None or not dense or tensor.nbytes < self._least_bytes:
            return tensor.detach()
        return self._put(call, tensor.detach())

    def _put_chosen(
        self, call: _Call, chosen: set[int], others: set[int] | None, tensor: Tensor
    ) -> Tensor | _StoredTensor:
        memory = tensor.untyped_storage()._cdata
        if memory in chosen:
            return self._put(call, tensor) if tensor.is_contiguous() else tensor
        is_made = others is not None and memory not in others and not tensor.is_meta
        return self.keep(tensor) if is_made else tensor

    def _put(self, call: _Call, tensor: Tensor) -> Tensor | _StoredTensor:
        """Return a dense tensor; its strides are kept."""
        offset = self.room.take(tensor.nbytes)
        if offset is None:
            return tensor
        host = self._host(tensor.device)[offset : offset + tensor.nbytes].view(tensor.dtype)
        host = host.as_strided(tensor.shape, tensor.stride())
        piece = _StoredTensor(call, tensor.detach(), host, offset, self._streams)
        weakref.finalize(piece, self.room.give_back, offset).atexit = False
        call.pieces.append(weakref.ref(piece))
        if tensor.is_cuda:
            self._leaving.append(piece)
        else:
            piece.leave()
        return piece

    def _host(self, device: torch.device) -> Tensor:
        """Return the whole buffer as bytes; pinned where the device is a GPU."""
        if self._memory is None:
            key = f"model.grad_ckpt_buffer_size = {self.room.num_bytes}"
            try:
                self._memory, pinned = host_memory(self.room.num_bytes, device, self)
            except torch.AcceleratorError:  # an earlier kernel's
                raise
            except RuntimeError:
                raise UserError(
                    f"{key}: the host cannot allocate so much; choose fewer bytes (every process takes them)"
                ) from None
            if not pinned:
                raise UserError(
                    f"{key}: the host cannot pin so much; choose fewer bytes, or raise the limit on locked memory: "
                    "ulimit -l unlimited, in a container --ulimit memlock=-1"
                )
            self._streams = CopyStreams(device)
        return self._memory


def offloaded_block(
    forward: Callable[..., Any], store: BlockStore, block: nn.Module | None = None
) -> Callable[..., Any]:
    """Return a block's forward whose inputs are in `store` until backward; where `block` is given, whose forward is
    compiled, what compiled code saves as well."""
    return partial(_run_offloaded, forward, store, block)


def _run_offloaded(forward: Callable[..., Any], store: BlockStore, block: nn.Module | None, *args: Any) -> Any:
    given = None if block is None else [*tensors_in(args), *block.parameters(), *block.buffers()]
    with store.takes(args, given):
        return forward(*args)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a block is called with, in tuples, lists and dataclasses too."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def back(kept: Any) -> Any:
    """Return a tensor that `BlockStore` holds, on its device; anything else as it is."""
    return kept.fetch() if isinstance(kept, _StoredTensor) else kept


class Room:
    """A first-fit allocator of ranges in a buffer of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: dict[int, int] = {}  # offset -> end
        self.most_bytes = 0  # peak of `used_bytes`

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now, rounded up to the alignment."""
        return sum(end - offset for offset, end in self._taken.items())

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of a new range, or None where none fits."""
        size, start = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, 0
        for offset, end in sorted(self._taken.items()):
            if offset - start >= size:
                break
            start = end
        if start + size > self.num_bytes:
            return None
        self._taken[start] = start + size
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return start

    def give_back(self, offset: int) -> None:
        """Free the range at this offset."""
        del self._taken[offset]


class _Call:
    """One forward of one block: the tensors it stored, and the call before it, whose backward comes next."""

    def __init__(self, before: weakref.ref[_Call] | None) -> None:
        self.before = before
        self.pieces: list[weakref.ref[_StoredTensor]] = []


class _StoredTensor:
    """An offloaded tensor; also on the device while a copy is under way."""

    def __init__(self, call: _Call, tensor: Tensor, host: Tensor, place: int, streams: CopyStreams) -> None:
        self.call, self._host, self._place, self._streams = call, host, place, streams
        self._here: Tensor | None = tensor
        self._device, self._wait = tensor.device, partial(streams.wait_to_host, place)
        streams.to_host(place, host, tensor)

    def leave(self) -> None:
        """Free the device's copy."""
        self._wait()
        self._here = None

    def come_back(self) -> None:
        """Start the copy back to the device, unless the tensor is there."""
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._streams.begin()
            self._streams.to_device(self._place, self._here, self._host)
            self._wait = partial(self._streams.wait_to_device, self._place)

    def fetch(self) -> Tensor:
        """Return the tensor on the device; those of the call before are prefetched."""
        self.come_back()
        self._wait()
        tensor, self._here = self._here, None
        before = self.call.before and self.call.before()
        for piece in before.pieces if before is not None else ():
            if (alive := piece()) is not None:
                alive.come_back()
        return tensor
