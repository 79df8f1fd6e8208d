"""A batch as one stretch of bytes: how it goes from a worker to the trainer, into pinned memory, to a device, to peers.

One stretch is one copy at each of these stations, whatever tensors a batch has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longtake.contracts import Batch

_ALIGNED = 256  # bytes; any type may begin there, and a device reads whole lines


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the bytes of its parcel, and what it is there."""

    start: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Parcel:
    """A batch whose tensors are `Place`s in `data`, a uint8 tensor of one dim on the CPU or a device."""

    plan: Batch
    data: Tensor

    @property
    def batch(self) -> Batch:
        """The batch; its tensors are views of `data`."""
        return _walk(self.plan, Place, lambda place: _view(self.data, place))

    @property
    def num_loaded(self) -> int:
        """How many samples train."""
        return int(_view(self.data, self.plan.weights).count_nonzero())

    def on(self, data: Tensor) -> Parcel:
        """Return the same parcel with its bytes in another place; `data` may be longer than needed."""
        return Parcel(self.plan, data[: len(self.data)])


def plan_parcel(batch: Batch) -> tuple[Batch, list[tuple[Place, Tensor]], int]:
    """`(plan, contents, number of bytes)`: the batch with `Place`s for its tensors, and which tensor goes where."""
    contents: list[tuple[Place, Tensor]] = []
    end = 0

    def place(tensor: Tensor) -> Place:
        nonlocal end
        found = Place(-(-end // _ALIGNED) * _ALIGNED, tuple(tensor.shape), tensor.dtype)
        end = found.start + found.num_bytes
        contents.append((found, tensor))
        return found

    return _walk(batch, Tensor, place), contents, end


def pack(batch: Batch) -> Parcel:
    """Return the batch in one stretch of ordinary memory."""
    plan, contents, num_bytes = plan_parcel(batch)
    data = torch.empty(num_bytes, dtype=torch.uint8)
    for place, tensor in contents:
        _view(data, place).copy_(tensor)
    return Parcel(plan, data)


def _view(data: Tensor, place: Place) -> Tensor:
    return data[place.start : place.start + place.num_bytes].view(place.dtype).view(place.shape)


def _walk(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with every `kind` in its fields and mappings changed; parts without one are kept as they are."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _walk(part, kind, change) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Place)):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _walk(part, kind, change) for name, part in parts.items()}
        different = {name: part for name, part in changed.items() if part is not parts[name]}
        return dataclasses.replace(value, **different) if different else value
    return value
