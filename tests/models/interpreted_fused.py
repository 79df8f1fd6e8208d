"""Fused norms, rotations and gates by Triton's kernels beside the formulas: `python -m tests.models.interpreted_fused`,
on CUDA where there is.

Without a GPU Triton's interpreter runs them, which a process must choose before it imports Triton. Prints one JSON
object: for a case, the largest difference of results and gradients over the largest value.
"""

from __future__ import annotations

import json
import os

import torch


def main() -> None:
    device, half = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from longtake.models import fused
    from tests.models.interpreted_temporal import far
    from tests.models.test_fused import CASES, outcome

    fused.runs_here = lambda _: True
    found = {}
    for dtype in (torch.float32, half):
        for name, case in CASES.items():
            exact = outcome(case, 1, torch.float64, device, of=dtype)
            pairs = zip(outcome(case, 0, dtype, device), exact, strict=True)
            found[f"{dtype} {name}"] = max(far(ours, theirs) for ours, theirs in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
