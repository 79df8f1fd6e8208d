"""Softmax attention by PyTorch's own kernels and FlashAttention-3, each as a forward that gives the log-sum-exp of the
scores and a backward that takes it, so that parts of one attention can be merged without recomputing them.

Shapes: q [B, N, l, K], k and v [B, N, m, K]; the log-sum-exp of the scaled scores is [B, N, l], float32 (float64 for
float64). None has a mask or dropout, so the state of random numbers that PyTorch's kernels hand on is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from longtake.models.config import Backend

_HALF = (torch.bfloat16, torch.float16)
_CHUNK_BYTES = 64 << 20  # of one chunk's float32 scores, where no kernel fits
_ROW = 8  # flash attention reads rows of a multiple of so many numbers
_LSE_ROW = 32  # the memory-efficient kernel writes log-sum-exps in multiples of so many queries

Kernel = Literal["flash", "cudnn", "efficient", "cpu", "fa3", "math"]
_BY_NUMBER: dict[int, Kernel] = {1: "flash", 2: "efficient", 3: "cudnn"}  # `SDPBackend`


def kernel_of_block(q: Tensor, backend: Backend = "auto") -> Kernel:
    """Return the kernel for one block of keys, where the run's attention is `backend`.

    On CUDA the one that was chosen for the run: PyTorch's choice for "auto" and "sdpa"; cuDNN (up to head size 128) or
    FlashAttention-3 in half precision (head sizes 8, 16, ... 256), or the memory-efficient one, also in float32; else
    FlashAttention-2 in half precision; the fused kernel on a CPU; chunked matmul and softmax for `math` and where none
    fits. The meta device, on which a plan counts, stands for CUDA.
    """
    if backend == "math":
        return "math"
    if q.device.type == "cpu":
        return "cpu"
    if q.is_cuda and backend in ("auto", "sdpa"):
        return kernel_of_all(q, q, q, backend)
    if backend == "efficient" and q.dtype in (torch.float32, *_HALF):
        return "efficient"
    fits = q.device.type in ("cuda", "meta") and q.dtype in _HALF and q.shape[-1] % _ROW == 0 and q.shape[-1] <= 256
    if fits and (backend == "fa3" or (backend == "cudnn" and q.shape[-1] <= 128)):
        return backend
    return "flash" if fits else "math"


def kernel_of_all(q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> Kernel:
    """Return the kernel for all keys at once: the one that `backend` names, by name or as
    `scaled_dot_product_attention` would take for these tensors, were they to get gradients. The meta device stands
    for CUDA with FlashAttention-2."""
    if backend in ("fa3", "math"):
        return backend
    if q.is_meta or (backend == "flash" and q.device.type == "cpu"):
        return "flash" if q.is_meta else "cpu"
    if backend in ("flash", "cudnn", "efficient"):
        return backend
    with torch.enable_grad():
        number = torch._fused_sdp_choice(*(x.detach().requires_grad_() for x in (q, k, v)))
    found = _BY_NUMBER.get(number, "math")
    return "cpu" if found == "flash" and q.device.type == "cpu" else found


def attend_block(q: Tensor, k: Tensor, v: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v over this block alone [B, N, l, K], and the log-sum-exp of its scores."""
    return attend(q, k, v, kernel_of_block(q, backend))


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of q, k and v; `out` and `lse` are those over *all* blocks.

    With those, a weight is exp(score - lse), and sum(grad * out) is the mean that softmax's backward subtracts.
    """
    return attend_backward(grad, q, k, v, out, lse, kernel_of_block(q, backend))


def attend(q: Tensor, k: Tensor, v: Tensor, which: Kernel) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v [B, N, l, K], and the log-sum-exp of the scores."""
    scale, width = _scale(q), q.shape[-1]
    if which in ("flash", "fa3"):
        _use_flash_attention(which, q)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*map(_filled, (q, k, v)), scale=scale)
        return out[..., :width], lse[..., : q.shape[2]]
    if which == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
        return out, lse.view(q.shape[:3])
    if which == "efficient":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
        return out, lse[..., : q.shape[2]]
    if which == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    outs, lses = [], []
    wide = torch.promote_types(q.dtype, torch.float32)
    for part in q.split(_rows(q, k), dim=2):
        scores = (part.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
        lses.append(scores.logsumexp(-1))
        outs.append(scores.sub_(lses[-1][..., None]).exp_() @ v.to(wide))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given what `attend` gave."""
    scale, width, sizes = _scale(q), q.shape[-1], (q.shape[2], k.shape[2])
    if which in ("flash", "fa3"):
        _use_flash_attention(which, q)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused dropout RNG state
        grad, q, k, v, out = map(_filled, (grad, q, k, v, out))
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, *sizes, 0.0, False, state, state[0], scale=scale
        )
        return tuple(one[..., :width] for one in found)
    if which in ("cudnn", "efficient"):
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if which == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], state[0], state[1], None, None, None, *sizes, 0.0, False, scale=scale
        )
    if which == "efficient":
        lse = F.pad(lse, (0, -sizes[0] % _LSE_ROW), value=torch.inf)  # as its forward does
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, state[0], state[1], 0.0, [True, True, True, False], False, scale=scale
        )[:3]
    if which == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, scale=scale
        )
    return _math_backward(grad, q, k, v, out, lse)


@contextmanager
def flash_attention_restored() -> Iterator[None]:
    """Restore PyTorch's flash attention, FlashAttention-2 or 3, after the context, in which kernels are tried."""
    before = current_flash_attention_impl()
    try:
        yield
    finally:
        _activate(before)


def _use_flash_attention(which: Kernel, q: Tensor) -> None:
    """Make PyTorch's flash attention on CUDA FlashAttention-3 or, for any other kernel, its own FlashAttention-2.

    The choice holds for the whole process, so alternating between the two registers kernels each time.
    """
    if not q.is_meta:
        _activate("FA3" if which == "fa3" else None)


def _activate(implementation: str | None) -> None:
    if current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(implementation)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale, wide = _scale(q), lse.dtype
    keys, values = k.to(wide), v.to(wide)
    dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    rows = _rows(q, k)
    for one in zip(*(x.split(rows, dim=2) for x in (q, grad, out, lse)), strict=True):
        q_, grad_, out_ = (x.to(wide) for x in one[:3])
        weights = ((q_ * scale) @ keys.transpose(-1, -2)).sub_(one[3][..., None]).exp_()
        dv += weights.transpose(-1, -2) @ grad_
        mean = (grad_ * out_).sum(-1, keepdim=True)
        scores = weights.mul_((grad_ @ values.transpose(-1, -2)).sub_(mean)).mul_(scale)
        dqs.append(scores @ keys)
        dk += scores.transpose(-1, -2) @ q_
    return torch.cat(dqs, 2), dk, dv


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])  # as PyTorch has it, to the last bit


def _filled(x: Tensor) -> Tensor:
    """Rows of zeros behind, to a width that flash attention takes; they change neither scores nor gradients."""
    return F.pad(x, (0, -x.shape[-1] % _ROW)) if x.shape[-1] % _ROW else x


def _rows(q: Tensor, k: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * q.shape[0] * q.shape[1] * max(1, k.shape[2])))
