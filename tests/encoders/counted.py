"""What an encoder's forward costs in bf16, counted over the real module on stand-ins of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from tests.plan.trace import CPU, _NoModules

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module], object]


def counted_bytes(build: Build, run: Run) -> int:
    """Bytes that `run` adds at its worst moment to the weights of what `build` makes, without gradients."""
    with FakeTensorMode(), torch.no_grad():
        module = _in_bf16(build)
        tracker = MemTracker()
        tracker._mod_tracker = _NoModules()
        tracker.track_external(module)
        with tracker:
            before = tracker.get_tracker_snapshot("current")[CPU]["Total"]
            run(module)
            peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    return peak - before


def counted_flops(build: Build, run: Run) -> int:
    """FLOPs of `run`."""
    with torch.device("meta"), torch.no_grad():
        module = _in_bf16(build)
        with FlopCounterMode(display=False) as counter:
            run(module)
    return counter.get_total_flops()


def _in_bf16(build: Build) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build().requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(torch.float32)
