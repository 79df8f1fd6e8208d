"""Full attention as a submodule, so that a parallel plan can replace it without touching the model."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Longest sequence for which plain matmul-softmax beats scaled_dot_product_attention on a CPU, forward and backward,
# 4 heads of 32 to 128: in fp32 they meet near 256 tokens; in bf16 the fused kernel is 3-7 times slower up to 128
# tokens and meets plain attention between 1,000 and 2,000 (2 threads, torch 2.13).
_MATH_TOKENS = {torch.float32: 256, torch.bfloat16: 1024}


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over whole sequences, no mask, no parameters.

    Called as `attention(q, k, v)` with q [B, Lq, N, K] and k, v [B, Lk, N, K]; returns [B, Lq, N, K].
    `backend`: "sdpa" (PyTorch's fused kernels), "math" (matmul, softmax, matmul) or "auto": math for short sequences
    on a CPU, where the fused kernel's backward is slow, else sdpa.
    """

    def __init__(self, backend: Literal["auto", "sdpa", "math"] = "auto") -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.backend == "math" or (self.backend == "auto" and _prefers_math(q, k)):
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            out = scores.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


def _prefers_math(q: Tensor, k: Tensor) -> bool:
    return q.device.type == "cpu" and max(q.shape[-2], k.shape[-2]) <= _MATH_TOKENS.get(q.dtype, 0)
