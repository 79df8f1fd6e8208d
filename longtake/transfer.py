"""Copies of small tensors from the host to a device that do not make the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. To a GPU it goes through pinned memory, which PyTorch keeps until the copy is
    done: from other memory a copy would first wait for all kernels that were launched before it."""
    is_on_host = numbers.device.type == "cpu" and type(numbers) is Tensor  # not a fake tensor of a forecast
    if device.type == "cuda" and is_on_host:
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
