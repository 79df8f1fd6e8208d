"""FlashAttention-3's package, played by the CPU's kernel, with the functions that two of its releases have."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ATEN = torch.ops.aten


def install(patch: pytest.MonkeyPatch, release: str = "operators") -> list[str]:
    """Puts the package in place: "operators" of torch, all arguments with defaults, or "functions", of which most have
    none. Returns a list that names every call, and says of a backward whether it is to repeat itself."""
    calls: list[str] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(*_heads(q, k, v), scale=scale)
        return out.transpose(1, 2).contiguous(), lse

    def backward(tensors: tuple[Tensor, ...], lse: Tensor, into: tuple[Tensor, ...], scale: float, same: bool) -> None:
        calls.append(f"backward, deterministic={same}")
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads(*tensors), lse, 0.0, False, scale=scale
        )
        for one, value in zip(into, found, strict=True):
            one.copy_(value.transpose(1, 2))

    package = ModuleType("flash_attn_interface")
    if release == "operators":
        package._flash_attn_forward, package._flash_attn_backward = _operators(forward, backward)
    else:

        def _flash_attn_forward(
            q: Any, k: Any, v: Any, k_new: Any, out: Any, softmax_scale: Any, causal: Any, window_size: Any = (-1, -1)
        ) -> tuple[Any, ...]:
            assert (k_new, out, causal, window_size) == (None, None, False, (-1, -1))
            return *forward(q, k, v, softmax_scale), None, None

        def _flash_attn_backward(
            dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, max_seqlen_q: Any, dq: Any, dk: Any, dv: Any,
            softmax_scale: Any, causal: Any, window_size: Any = (-1, -1), deterministic: bool = False,
        ) -> None:  # fmt: skip
            assert (max_seqlen_q, causal, window_size) == (None, False, (-1, -1))
            backward((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, deterministic)

        package._flash_attn_forward, package._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    patch.setitem(sys.modules, "flash_attn_interface", package)
    return calls


def _heads(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _operators(forward: Any, backward: Any) -> tuple[Any, Any]:
    @torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert (qv, causal) == (None, False)
        return *forward(q, k, v, softmax_scale), q.new_empty(0)

    @torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None = None,
        dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
        deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not is_causal
        backward((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, deterministic)
        return softmax_lse.new_empty(0)

    return _flash_attn_forward, _flash_attn_backward
