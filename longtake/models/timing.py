"""What is the fastest on a GPU: kernels of attention run forward and backward at a run's own shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import ceil

import torch

from longtake.models.attention import Attention, fault_of
from longtake.models.attention_kernels import flash_attention_restored
from longtake.models.config import Backend
from longtake.models.failures import Report, failure_of

_REPEATS = 3
_CANDIDATES: tuple[Backend, ...] = ("cudnn", "flash", "fa3", "efficient")
_WAIT_CYCLES = 20_000_000  # of the device's clock: ten milliseconds, in which the host launches what is timed
_BUSY_SECONDS, _MOST_CALLS = 0.03, 100  # of what is timed, one call after another
_CUDNN = 91501  # the first release that is right for every length; PyTorch itself prefers cuDNN from there on
_CUDA = (12, 9)  # below it PyTorch's cuDNN attention is off


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention computes on in one call."""

    batch: int
    tokens: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens:,} tokens, {self.heads} heads of {self.width}"


def time_backends(shape: AttentionShape, device: torch.device, dtype: torch.dtype, report: Report) -> dict[str, float]:
    """Seconds of a forward and backward by each kernel that runs on this CUDA device and is right for every length.
    `report` is called for the others."""
    sizes = shape.batch, shape.tokens, shape.heads, shape.width
    q, k, v, grad = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(4))
    inputs = [one.requires_grad_() for one in (q, k, v)]

    def run(name: Backend) -> None:
        torch.autograd.grad(Attention(name)(*inputs), inputs, grad)

    runs = {name: partial(run, name) for name in backends_of(device, dtype, shape.width, report)}
    with flash_attention_restored():
        seconds = time_each(runs, device, report)
    torch.cuda.empty_cache()
    return seconds


def backends_of(device: torch.device, dtype: torch.dtype, width: int, report: Report) -> list[Backend]:
    """The kernels of attention that run on this CUDA device with heads of this width, right for every length. `report`
    is called for the others."""
    usable = []
    for name in _CANDIDATES:
        fault = fault_of(name, device, dtype, width)
        if fault is None and name == "cudnn" and _cudnn() < _CUDNN:
            fault = f"cuDNN {_dotted(_cudnn())} is wrong for some lengths, {_dotted(_CUDNN)} is not"
        if fault is None:
            usable.append(name)
        else:
            report(name, fault)
    return usable


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


def timed_on(device: torch.device) -> dict[str, str]:
    """What times on a device depend on beside what is timed, by name."""
    found = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        cudnn = str(torch.backends.cudnn.version())
        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), "cudnn": cudnn}
        if find_spec("flash_attn_interface") is not None:  # FlashAttention-3, which may be removed again
            found["flash_attn_interface"] = "installed"
    return found


def time_each(candidates: Mapping[str, Callable[[], None]], device: torch.device, report: Report) -> dict[str, float]:
    """The best seconds of a few calls of each candidate, in turns, the first call left out; those that fail are not in
    it, and `report` is called for them."""
    best: dict[str, float] = {}
    left = dict(candidates)
    for turn in range(1 + _REPEATS):
        for name, call in list(left.items()):
            try:
                seconds = seconds_of(call, device)
            except RuntimeError as error:  # not at this shape, or out of memory
                report(name, failure_of(error, device))
                del left[name]
                best.pop(name, None)
                continue
            if turn:
                best[name] = min(seconds, best.get(name, float("inf")))
    return best


def slow_on_hopper(chosen: str, device: torch.device) -> str | None:
    """Why a Hopper GPU is left on FlashAttention-2, in a sentence; None where it is not, or nothing is known."""
    if chosen != "flash" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    cuda, cudnn = torch.version.cuda or "0.0", _cudnn()
    if tuple(map(int, cuda.split(".")[:2])) < _CUDA:
        wants = ".".join(map(str, _CUDA))
        return (
            f"PyTorch's CUDA is {cuda} and cuDNN's attention wants {wants} or newer; pip install --force-reinstall "
            f"torch=={torch.__version__.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130"
        )
    if cudnn < _CUDNN:
        here, wants = _dotted(cudnn), _dotted(_CUDNN)
        own = next(filter(None, map(_release, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))), 0)
        if own > cudnn:
            return f"cuDNN {here} is loaded in place of PyTorch's own {_dotted(own)}; take it off LD_LIBRARY_PATH"
        wheel = f"nvidia-cudnn-cu{cuda.split('.')[0]}"
        return f"cuDNN {here} is wrong for some lengths, {wants} is not; pip install '{wheel}>={wants}'"
    return None


def _dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def _cudnn() -> int:
    return torch.backends.cudnn.version() or 0


def _release(package: str) -> int | None:
    """The installed release of cuDNN's wheel, as the library counts."""
    try:
        major, minor, patch = map(int, version(package).split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
    return major * 10000 + minor * 100 + patch
