"""Which kernel of attention is the fastest on a GPU: candidates run forward and backward at a run's own shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from longtake.models.attention import Attention, fault_of
from longtake.models.config import Backend

_REPEATS = 3
_CANDIDATES: tuple[Backend, ...] = ("cudnn", "flash", "fa3", "efficient")
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


def time_kernels(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of a forward and backward by each kernel that runs on this CUDA device and is right for every length."""
    found = {name: fault_of(name, device, dtype, shape.width) for name in _CANDIDATES}
    runs = [name for name in _CANDIDATES if found[name] is None and (name != "cudnn" or _cudnn() >= _CUDNN)]
    sizes = shape.batch, shape.tokens, shape.heads, shape.width
    q, k, v, grad = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(4))
    inputs = [one.requires_grad_() for one in (q, k, v)]

    def run(name: Backend) -> None:
        torch.autograd.grad(Attention(name)(*inputs), inputs, grad)

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    seconds = time_each({name: partial(run, name) for name in runs}, clock)
    torch.cuda.empty_cache()
    return seconds


def time_each(candidates: Mapping[str, Callable[[], None]], clock: Callable[[], float]) -> dict[str, float]:
    """The best seconds of a few calls of each candidate, in turns, the first call left out; those that fail are not in
    it. `clock` waits for the device."""
    best: dict[str, float] = {}
    left = dict(candidates)
    for turn in range(1 + _REPEATS):
        for name, call in list(left.items()):
            start = clock()
            try:
                call()
            except RuntimeError:  # not at this shape, or out of memory
                del left[name]
                best.pop(name, None)
                continue
            if turn:
                best[name] = min(clock() - start, best.get(name, float("inf")))
    return best


def slow_on_hopper(chosen: str, device: torch.device) -> str | None:
    """Why a Hopper GPU is left on FlashAttention-2, in a sentence; None where it is not, or nothing is known."""
    if chosen != "flash" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    cuda, cudnn = torch.version.cuda or "0.0", _cudnn()
    if tuple(map(int, cuda.split(".")[:2])) < _CUDA:
        return f"PyTorch's CUDA is {cuda} and cuDNN's attention wants {'.'.join(map(str, _CUDA))}; install such a build"
    if cudnn < _CUDNN:
        own = next(filter(None, map(_release, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))), 0)
        if own > cudnn:
            return f"cuDNN {cudnn} is loaded in place of PyTorch's own {own}; take it off LD_LIBRARY_PATH"
        return f"cuDNN {cudnn} is too old, {_CUDNN} is right for every length; install nvidia-cudnn of that release"
    return None


def _cudnn() -> int:
    return torch.backends.cudnn.version() or 0


def _release(package: str) -> int | None:
    """The installed release of cuDNN's wheel, as the library counts."""
    try:
        major, minor, patch = map(int, version(package).split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
    return major * 10000 + minor * 100 + patch
