"""Attention of queries to one block of keys by PyTorch's kernels, with the log-sum-exp that merging blocks needs.

Shapes: q [B, N, l, K], k and v [B, N, m, K]; the log-sum-exp of the scaled scores is float32 [B, N, l].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from longtake.models.attention import HALF, Backend

_CHUNK_BYTES = 64 << 20  # of one chunk's float32 scores, where no kernel fits

Kernel = Literal["flash", "cudnn", "cpu", "math"]


def kernel(q: Tensor, backend: Backend = "auto") -> Kernel:
    """The kernel for blocks, where the run's attention is `backend`.

    It must return the log-sum-exp and take one in backward: on CUDA (half precision, head sizes 8, 16, ... 256) cuDNN
    where that was chosen for the run (up to 128), else FlashAttention-2; the fused kernel on a CPU; chunked matmul and
    softmax for `math` and where none fits. The meta device, on which a plan counts, stands for CUDA.
    """
    if backend == "math":
        return "math"
    if q.device.type == "cpu":
        return "cpu"
    fits = q.device.type in ("cuda", "meta") and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if fits and backend == "cudnn" and q.shape[-1] <= 128:
        return "cudnn"
    return "flash" if fits else "math"


def attend_block(q: Tensor, k: Tensor, v: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v over this block alone [B, N, l, K], and the log-sum-exp of its scores."""
    scale = q.shape[-1] ** -0.5
    which = kernel(q, backend)
    if which == "flash":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return out, lse[..., : q.shape[2]]
    if which == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
        return out, lse.view(q.shape[:3])
    if which == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    outs, lses = [], []
    for part in q.split(_rows(q, k), dim=2):
        scores = (part.float() * scale) @ k.float().transpose(-1, -2)
        lses.append(scores.logsumexp(-1))
        outs.append(scores.sub_(lses[-1][..., None]).exp_() @ v.float())
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v; `out` and `lse` are those over *all* blocks.

    With those, a weight is exp(score - lse), and sum(grad * out) is the mean that softmax's backward subtracts.
    """
    scale = q.shape[-1] ** -0.5
    which = kernel(q, backend)
    if which == "flash":
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused dropout RNG state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, state, state[0], scale=scale
        )
        return dq, dk, dv
    if which == "cudnn":
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        sizes = q.shape[2], k.shape[2]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], state[0], state[1], None, None, None, *sizes, 0.0, False, scale=scale
        )
    if which == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, scale=scale
        )
    return _math_backward(grad, q, k, v, out, lse)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    keys, values = k.float(), v.float()
    dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    rows = _rows(q, k)
    for one in zip(*(x.split(rows, dim=2) for x in (q, grad, out, lse)), strict=True):
        q_, grad_, out_ = (x.float() for x in one[:3])
        weights = ((q_ * scale) @ keys.transpose(-1, -2)).sub_(one[3][..., None]).exp_()
        dv += weights.transpose(-1, -2) @ grad_
        mean = (grad_ * out_).sum(-1, keepdim=True)
        scores = weights.mul_((grad_ @ values.transpose(-1, -2)).sub_(mean)).mul_(scale)
        dqs.append(scores @ keys)
        dk += scores.transpose(-1, -2) @ q_
    return torch.cat(dqs, 2), dk, dv


def _rows(q: Tensor, k: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * q.shape[0] * q.shape[1] * max(1, k.shape[2])))
