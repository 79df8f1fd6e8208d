"""Speed and memory of a run, from the host's clock and counters: nothing here waits for the device.

Model FLOPs count what the model's mathematics needs (forward and backward, recomputation left out); MFU is their
rate over the devices' peak, as in Chowdhery et al., "PaLM" (2022), appendix B.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Step:
    seconds: float
    clips: float
    tokens: float
    flops: float
    wait_seconds: float


class StepMeter:
    """Rates over the last `window` steps of the whole job.

    `peak`: FLOP/s of one device, or None; `num_devices`: devices that share the work. The clock starts with the first
    `step` call, which therefore measures nothing: it contains compilation and the start of the workers.
    """

    def __init__(
        self,
        peak: float | None = None,
        num_devices: int = 1,
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._peak, self._num_devices, self._clock = peak, num_devices, clock
        self._steps: deque[_Step] = deque(maxlen=window)
        self._mark: float | None = None

    def step(self, *, clips: float, tokens: float, flops: float = 0.0, wait_seconds: float = 0.0) -> None:
        """Call after each optimizer step with its counts over all ranks.

        `flops`: model FLOPs; `wait_seconds`: how long this rank stood waiting for data.
        """
        now = self._clock()
        if self._mark is not None:
            self._steps.append(_Step(now - self._mark, clips, tokens, flops, wait_seconds))
        self._mark = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside (checkpoints, validation, samples) out of the rates."""
        start = self._clock()
        try:
            yield
        finally:
            if self._mark is not None:
                self._mark += self._clock() - start

    def read(self) -> dict[str, float]:
        """Rates by name; empty before the second step.

        `step_seconds`, `clips_per_second`, `tokens_per_second`, `wait_share` (0 to 1); with FLOPs counted also
        `tflops_per_device` (10^12 per second), and `mfu` (0 to 1) where the peak is known.
        """
        seconds = sum(step.seconds for step in self._steps)
        if seconds <= 0:
            return {}
        values = {
            "step_seconds": seconds / len(self._steps),
            "clips_per_second": sum(step.clips for step in self._steps) / seconds,
            "tokens_per_second": sum(step.tokens for step in self._steps) / seconds,
            "wait_share": min(1.0, sum(step.wait_seconds for step in self._steps) / seconds),
        }
        flops = sum(step.flops for step in self._steps) / seconds / self._num_devices
        if flops > 0:
            values["tflops_per_device"] = flops / 1e12
            if self._peak:
                values["mfu"] = flops / self._peak
        return values


def memory() -> dict[str, float]:
    """Memory in GiB: `rss_gib` of this process, and on CUDA `cuda_gib`, the most that tensors have taken so far."""
    values = {"rss_gib": resident_bytes() / 2**30}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        values["cuda_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return values


def resident_bytes() -> int:
    """Resident memory of this process: the present value on Linux, the highest so far elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource  # Windows has none

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
