"""Seconds of a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil

import torch

_WAIT_CYCLES = 20_000_000  # of the device's clock: ten milliseconds, in which the host launches what is timed
_BUSY_SECONDS, _MOST_CALLS = 0.03, 100  # of what is timed, one call after another


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a device takes for a call. On CUDA calls are launched while the device still waits, so that the
    host's time for launching counts only where the device would run out of work, as in a step; and as many follow one
    another as keep the device busy for longer than it waited, for the rate of a burst is not that of a step."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    seconds = _seconds_of_each(call, device, 1)
    count = min(_MOST_CALLS, ceil(_BUSY_SECONDS / max(seconds, 1e-6)))
    return seconds if count == 1 else _seconds_of_each(call, device, count)


def _seconds_of_each(call: Callable[[], object], device: torch.device, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_WAIT_CYCLES)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
