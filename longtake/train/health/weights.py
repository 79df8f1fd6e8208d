"""Weights with NaN, infinity or values out of all bounds, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from longtake.checkpoint.folder import LOW_NOISE
from longtake.parallel.world import World

_SHOWN = 3
LARGEST = 1e6  # of a weight: norms keep activations finite, and the loss too, long after weights have left all sense
_CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def describe_broken(tensors: Mapping[str, Tensor], world: World) -> str:
    """Names of tensors that hold NaN or infinity, or weights above `LARGEST`, on any rank: the first three and how
    many more; empty where none does.

    Optimizer state holds squares of gradients, which may be larger. Collective. Each tensor is read once where it is,
    and the device is waited for once.
    """
    parts = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.dtype in _CHECKED and part.numel() and not part.is_meta}
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    broken: set[str] = set()
    for names in by_device.values():
        # the sum of absolute values is slower and may overflow; minimum and maximum carry NaN along
        largest = torch.stack([torch.stack(torch.aminmax(parts[name])).abs().max().float() for name in names])
        for name, value in zip(names, largest.tolist(), strict=True):
            limit = math.inf if name.removeprefix(LOW_NOISE).startswith("optim") else LARGEST
            if not (value < math.inf and value <= limit):
                broken.add(name)
    every = set().union(*world.gather(broken))
    order = [name for name in tensors if name in every]
    more = f" and {len(order) - _SHOWN} more" if len(order) > _SHOWN else ""
    return ", ".join(order[:_SHOWN]) + more
