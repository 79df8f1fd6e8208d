"""Host memory in which inputs of recomputed blocks wait for their backward, up to a bound in bytes.

On CUDA a stream of its own carries them out while the next block computes, and back one block before they are needed;
the host waits for nothing. The memory is one pinned piece, taken at first use and used again in every step. What finds
no room stays on the device. On a CPU the copies are plain.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.parallel.host import pin, unpin

_LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy
_ALIGNMENT = 512


class InputStore:
    """Takes tensors that autograd saves to the host's memory and brings them back for backward."""

    def __init__(self, num_bytes: int, least_bytes: int = _LEAST_BYTES) -> None:
        self.room = Room(num_bytes)
        self._least_bytes = least_bytes
        self._memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._now: weakref.ref[_Call] | None = None  # of the block that ran last
        self._leaving: list[_Piece] = []  # of the last block: still on the device while they are copied

    def takes(self, args: Iterable[Any]) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside `with`, those of `args` that are saved for backward, need gradients and are large wait on the host.

        For one block: what it is called with first is the block that is prefetched last.
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
        return torch.autograd.graph.saved_tensors_hooks(partial(self._put, call, chosen), _get)

    def _put(self, call: _Call, chosen: set[int], tensor: Tensor) -> Tensor | _Piece:
        if tensor.untyped_storage()._cdata not in chosen or not tensor.is_contiguous():
            return tensor
        offset = self.room.take(tensor.nbytes)
        if offset is None:
            return tensor
        host = self._host(tensor.device)[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        piece = _Piece(call, tensor.detach(), host, self._stream)
        weakref.finalize(piece, self.room.give_back, offset).atexit = False
        call.pieces.append(weakref.ref(piece))
        if self._stream is not None:
            self._leaving.append(piece)
        return piece

    def _host(self, device: torch.device) -> Tensor:
        """All of the host's memory as bytes; pinned where the device is a GPU."""
        if self._memory is None:
            said = f"model.grad_ckpt_buffer_size = {self.room.num_bytes}: the host has no memory of that size to"
            try:
                self._memory = torch.empty(self.room.num_bytes, dtype=torch.uint8)
            except RuntimeError:
                raise UserError(f"{said} give; choose fewer bytes (they are taken by every process)") from None
            if device.type == "cuda":
                if not pin(self._memory):
                    raise UserError(f"{said} pin; choose fewer bytes or raise the limit on locked memory")
                weakref.finalize(self, unpin, self._memory.data_ptr()).atexit = False
                self._stream = torch.cuda.Stream(device)
        return self._memory


class Room:
    """Which ranges of a memory of `num_bytes` are taken: the first gap that is large enough is given out."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: dict[int, int] = {}  # offset -> end
        self.most_bytes = 0  # that were taken at once

    @property
    def used_bytes(self) -> int:
        """Bytes taken now, as asked for rounded up to whole lines."""
        return sum(end - offset for offset, end in self._taken.items())

    def take(self, num_bytes: int) -> int | None:
        """The offset of a range that is free, or None where there is none."""
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
        """Frees the range that begins here."""
        del self._taken[offset]


class _Call:
    """One forward of one block: what it stored, and the call before it, which backward comes to next."""

    def __init__(self, before: weakref.ref[_Call] | None) -> None:
        self.before = before
        self.pieces: list[weakref.ref[_Piece]] = []


class _Piece:
    """A tensor on the host, and on the device while it leaves or returns."""

    def __init__(self, call: _Call, tensor: Tensor, host: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.call, self._host, self._stream = call, host, stream
        self._device = tensor.device
        self._here: Tensor | None = None
        self._moved: torch.cuda.Event | None = None  # when the copy under way is done
        if stream is None:
            host.copy_(tensor)
        else:
            self._here = tensor
            self._move(host, tensor)

    def _move(self, to: Tensor, source: Tensor) -> None:
        """Starts a copy behind all that the compute stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._moved = self._stream.record_event()

    def _wait(self) -> None:
        """What the compute stream is given from here on comes after the copy."""
        if self._moved is not None:
            torch.cuda.current_stream(self._device).wait_event(self._moved)
            self._moved = None

    def leave(self) -> None:
        """Frees the device's copy."""
        self._wait()
        self._here = None

    def come_back(self) -> None:
        """Starts the way back, unless it is under way or the tensor has not gone yet."""
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device, pin_memory=False)
            if self._stream is None:
                self._here.copy_(self._host)
            else:
                self._move(self._here, self._host)

    def fetch(self) -> Tensor:
        """The tensor on the device; the call before is prefetched."""
        self.come_back()
        self._wait()
        tensor, self._here = self._here, None
        before = self.call.before and self.call.before()
        for piece in before.pieces if before is not None else ():
            if (alive := piece()) is not None:
                alive.come_back()
        return tensor


def _get(kept: Tensor | _Piece) -> Tensor:
    return kept.fetch() if isinstance(kept, _Piece) else kept
