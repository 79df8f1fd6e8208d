"""Temporal attention by Triton's kernels beside the formula, on CUDA where there is any:
`python -m tests.models.interpreted_temporal`.

Without a GPU Triton's interpreter runs them, which a process must choose before it imports Triton. Prints one JSON
object: for a case, the largest difference of the result and of each gradient over the largest value.
"""

from __future__ import annotations

import json
import os

import torch
from torch import Tensor

CASES = ((2, 5, 3, 2, 72), (1, 20, 2, 1, 24), (1, 16, 1, 2, 64), (2, 1, 2, 1, 16))  # B, F, S, N, K


def compare(dtype: torch.dtype, device: str, sizes: tuple[int, ...]) -> dict[str, float]:
    from longtake.models.attention import TemporalAttention
    from longtake.models.temporal_attention import attend_over_time

    draw = torch.Generator().manual_seed(0)
    b, f, s, n, k = sizes
    joined = torch.randn(b, f, s, 3, n, k, generator=draw).to(device, dtype)  # strided, as of one projection
    rounded = [x.requires_grad_() for x in joined.unbind(3)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    grad = torch.randn(sizes, generator=draw).to(device, dtype)
    found = []
    for tensors, attention in ((rounded, attend_over_time), (exact, TemporalAttention("math"))):
        out = attention(*tensors)
        found.append([out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))])
    return {name: far(ours, theirs) for name, ours, theirs in zip(("out", "q", "k", "v"), *found, strict=True)}


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=1e-3))


def main() -> None:
    device, half = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    found = {f"{dtype} {sizes}": compare(dtype, device, sizes) for dtype in (torch.float32, half) for sizes in CASES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
