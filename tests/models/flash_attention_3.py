"""FlashAttention-3 as PyTorch registers it, played by the CPU's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _registry, register_flash_attention_impl

ATEN = torch.ops.aten


class _Handle:
    """Kernels that are registered until they are removed."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None


def install(patch: pytest.MonkeyPatch) -> list[str]:
    """Registers "FA3" in the place of PyTorch's until the test ends. Returns a list that names every activation and
    every call."""
    calls: list[str] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float | None = None) -> tuple[Any, ...]:
        calls.append("forward")
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse, None, None, q.shape[2], k.shape[2], state, state[0], out.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any, scale: float | None = None
    ) -> tuple[Tensor, ...]:
        calls.append("backward")
        return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, scale=scale
        )

    def register() -> _Handle:
        calls.append("activated")
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
        return _Handle(library)

    patch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    patch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    register_flash_attention_impl("FA3", register_fn=register)
    return calls
