"""The Triton kernels of TTT layers beside the formulas: `python -m tests.models.interpreted_ttt`, on CUDA if any.

Without a GPU Triton's interpreter runs them, which a process must choose before it imports Triton. Prints one JSON
object: for a case, the largest difference of the result and of each gradient over the largest value.
"""

from __future__ import annotations

import json
import os

import torch

NAMES = ("out", "q", "k", "target", "rate", "norm_weight", "norm_bias", "W1", "b1", "W2", "b2")
SIZES = ((2, 10, 2, 3), (1, 10, 1, 5))  # B, S, N, b: two segments, the last mini-batch filled; one without filling

PUBLISHED = (1, 70, 1, 64)


def compare(kind: str, dtype: torch.dtype, device: str, sizes: tuple[int, int, int, int]) -> dict[str, float]:
    from longtake.models import ttt_triton
    from longtake.models.ttt_scan import ttt_scan
    from tests.models.test_ttt_scan import inputs, off

    ttt_triton._TILE = 16  # two of the 32 hidden units
    b, s, n, mini_batch = sizes
    widths = {"k": 64, "m": 256} if mini_batch == 64 else {"k": 16, "m": 32}
    drawn = [tensor.detach().to(device) for tensor in inputs(kind, b, s, n, **widths)]
    if mini_batch == 64:  # as published: keys and queries of length 1, small networks, small rates
        drawn[:2] = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in drawn[:2])
        drawn[3:] = [drawn[3] * 1e-4, *drawn[4:6], *(0.04 * tensor for tensor in drawn[6:])]
    rounded = [tensor.to(dtype if i < 3 else torch.float32).requires_grad_() for i, tensor in enumerate(drawn)]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    found = []
    for tensors, body in ((rounded, "triton"), (exact, "oracle")):
        out = ttt_scan(*tensors[:6], tuple(tensors[6:]), mini_batch, body=body)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device).view_as(out)
        found.append([out, *torch.autograd.grad((out * weights).sum(), tensors)])
    return {name: off(ours.double(), theirs) for name, ours, theirs in zip(NAMES, *found, strict=False)}


def main() -> None:
    device, half = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    pairs = tuple(zip((torch.float32, half), SIZES, strict=True))
    cases = [(kind, *pair) for kind in ("linear", "mlp") for pair in pairs]
    cases.append(("mlp", half, PUBLISHED))
    print(json.dumps({f"{kind} {dtype} {sizes}": compare(kind, dtype, device, sizes) for kind, dtype, sizes in cases}))


if __name__ == "__main__":
    main()
