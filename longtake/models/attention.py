"""Full attention as a submodule, so that a parallel plan can replace it without touching the model, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longtake.contracts import UserError
from longtake.models.attention_kernels import flash_attention_restored
from longtake.models.attention_op import attention
from longtake.models.config import Backend
from longtake.models.failures import failure_of

# Operators by which tokens see each other, beside PyTorch's.
MIXERS = ("longtake::attention", "longtake::ttt_scan")
_SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}

_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_ON_CPU = ("auto", "sdpa", "flash", "math")
KERNEL_NAMES = {
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient attention",
    "math": "matmul and softmax",
    "fa3": "FlashAttention-3",
    "flex": "FlexAttention",
}
_PROBED_TOKENS = 256
_CUDNN = 91501  # the first release that is right for every length; PyTorch itself prefers cuDNN from there on
_CUDA = (12, 9)  # below it PyTorch's cuDNN attention is off

# Longest sequence for which plain matmul-softmax beats scaled_dot_product_attention on a CPU, forward and backward,
# 4 heads of 32 to 128: in fp32 they meet near 256 tokens; in bf16 the fused kernel is 3-7 times slower up to 128
# tokens and meets plain attention between 1,000 and 2,000 (2 threads, torch 2.13).
_MATH_TOKENS = {torch.float32: 256, torch.bfloat16: 1024}

_loaded: dict[str, Callable[..., Any]] = {}  # FlexAttention, once it is there


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over whole sequences, no mask, no parameters.

    Called as `attention(q, k, v)` with q [B, Lq, N, K] and k, v [B, Lk, N, K]; returns [B, Lq, N, K].
    `backend`: "sdpa" takes the kernel that `scaled_dot_product_attention` would, "flash", "cudnn" and "efficient" are
    its kernels; "fa3" is FlashAttention-3; all of these are one operator (`attention_op`). "math" is matmul, softmax,
    matmul, and "flex" FlexAttention. "auto" is math for short sequences on a CPU, where the fused kernel's backward is
    slow, else sdpa. `check_attention` tells beforehand what runs, and refuses what cannot.
    """

    def __init__(self, backend: Backend = "auto") -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_products = self.backend == "math" or (self.backend == "auto" and _prefers_math(q, k))
        if not by_products and self.backend != "flex":
            return attention(q, k, v, self.backend)[0]
        # These two stay outside of the operator: PyTorch differentiates them, and rounds, as it always has.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if by_products:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            out = scores.softmax(-1) @ v
        else:
            out = (_loaded.get("flex") or _load_flex())(q, k, v)
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


class TemporalAttention(Attention):
    """Attention over the frames at each place: q, k, v and the result are [B, F, S, N, K]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().forward(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
        return out.unflatten(0, (len(q), -1)).transpose(1, 2)


class SpatialAttention(Attention):
    """Attention over the places of each frame: q, k, v and the result are [B, F, S, N, K]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (len(q), -1))


class MaskedAttention(Attention):
    """Attention to the keys where mask, bool [B, 1, 1, Lk], is True, as to a text of its own length in each sample.

    Kernels take the mask as it is, so nothing waits for the device to say how long the texts are. Of the backends only
    math is its own; where another is asked for, PyTorch chooses among its kernels that take a mask.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.backend == "math":
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2)


def check_attention(wanted: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the kernel that `model.attention = wanted` means on this device, for compute in `dtype` and heads of width
    `head_dim`, as lines for a log: its name, and on Hopper a warning where cuDNN's cannot run.

    "auto" on CUDA is PyTorch's own order of preference: cuDNN before FlashAttention-2 on Hopper and newer, from the
    cuDNN release on that is right for every length. A named kernel is tried on the device, forward and backward. Raises
    `UserError` where it cannot run.
    """
    facts = f"({_SHORT.get(dtype, str(dtype))}, head width {head_dim})"
    if wanted == "cudnn" and torch.are_deterministic_algorithms_enabled():
        raise UserError(
            "model.attention = 'cudnn': its backward does not repeat itself, as deterministic = True asks; choose auto"
        )
    if device.type == "cpu":
        if wanted not in _ON_CPU:
            raise UserError(
                f"model.attention = {wanted!r}: needs a CUDA device and this run computes on {device.type}; choose "
                f"{', '.join(_ON_CPU[:-1])} or {_ON_CPU[-1]}"
            )
        fused, short = "PyTorch's fused CPU kernel", _MATH_TOKENS.get(dtype, 0)
        name = {
            "math": KERNEL_NAMES["math"],
            "auto": f"{KERNEL_NAMES['math']} up to {short} tokens, beyond them {fused}",
        }
        return [f"attention: {name.get(wanted, fused)} {facts}"]
    if wanted in ("auto", "sdpa"):
        kernel = _sdpa_choice(device, dtype, head_dim)
        lines = [f"attention: {KERNEL_NAMES[kernel]} {facts}"]
        if (reason := slow_on_hopper(kernel, device)) is not None:
            lines.append(f"attention: this Hopper GPU is left on FlashAttention-2: {reason}")
        return lines
    fault = fault_of(wanted, device, dtype, head_dim)
    if fault is not None:
        raise UserError(f"model.attention = {wanted!r}: does not run here {facts}: {_first_line(fault)}; choose auto")
    return [f"attention: {KERNEL_NAMES[wanted]} {facts}"]


def fault_of(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the reason why `backend` cannot compute attention on this CUDA device; None where it can."""
    assert backend in get_args(Backend)
    if backend == "fa3" and torch.cuda.get_device_capability(device)[0] != 9:
        return "it is made for Hopper GPUs"
    if backend == "cudnn" and 0 < _cudnn() < _CUDNN:
        return f"cuDNN {_dotted(_cudnn())} is wrong for some lengths, {_dotted(_CUDNN)} is not"
    q, k, v = _probe(device, dtype, head_dim)
    try:
        if backend in _SDPA:  # PyTorch's own call knows best what a kernel takes
            with sdpa_kernel(_SDPA[backend]):
                F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        with flash_attention_restored():
            Attention(backend)(q, k, v).sum().backward()
    except ImportError as error:
        return f"{KERNEL_NAMES[backend]} is not installed ({error})"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return failure_of(error, device)
    return None


def slow_on_hopper(kernel: str, device: torch.device) -> str | None:
    """Why a Hopper GPU is left on FlashAttention-2, in a sentence; None where it is not, or nothing is known."""
    if kernel != "flash" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    if torch.are_deterministic_algorithms_enabled():
        return None  # which cuDNN's backward is not
    cuda, cudnn = torch.version.cuda or "0.0", _cudnn()
    if tuple(map(int, cuda.split(".")[:2])) < _CUDA:
        needed = ".".join(map(str, _CUDA))
        return (
            f"PyTorch's CUDA is {cuda} and cuDNN's attention needs {needed} or newer; pip install --force-reinstall "
            f"torch=={torch.__version__.partition('+')[0]} --index-url https://download.pytorch.org/whl/cu130"
        )
    if cudnn < _CUDNN:
        loaded, needed = _dotted(cudnn), _dotted(_CUDNN)
        installed = next(filter(None, map(_release, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))), 0)
        if installed > cudnn:
            return f"cuDNN {loaded} is loaded in place of PyTorch's {_dotted(installed)}; take it off LD_LIBRARY_PATH"
        wheel = f"nvidia-cudnn-cu{cuda.split('.')[0]}"
        return f"cuDNN {loaded} is wrong for some lengths, {needed} is not; pip install '{wheel}>={needed}'"
    return None


def _dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def _cudnn() -> int:
    return torch.backends.cudnn.version() or 0


def _release(package: str) -> int | None:
    """Return the installed release of cuDNN's wheel, as the library counts."""
    try:
        major, minor, patch = map(int, version(package).split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
    return major * 10000 + minor * 100 + patch


def _first_line(text: str) -> str:
    return text.splitlines()[0].rstrip(".")


def _sdpa_choice(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the kernel that `scaled_dot_product_attention` takes by itself."""
    q, k, v = (x.transpose(1, 2) for x in _probe(device, dtype, head_dim))
    number = torch._fused_sdp_choice(q, k, v)
    return next((name for name, kernel in _SDPA.items() if int(kernel.value) == number), "math")


def _probe(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, ...]:
    shape = (1, _PROBED_TOKENS, 2, head_dim)
    return tuple(torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))


def _prefers_math(q: Tensor, k: Tensor) -> bool:
    return q.device.type == "cpu" and max(q.shape[1], k.shape[1]) <= _MATH_TOKENS.get(q.dtype, 0)


def _load_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    _loaded["flex"] = torch.compile(flex_attention, dynamic=True)  # not compiled, it would hold all scores in memory
    return _loaded["flex"]
