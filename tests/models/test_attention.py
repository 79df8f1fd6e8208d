"""Every kernel of attention computes softmax attention; which one runs is known beforehand and said."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from longtake.contracts import UserError
from longtake.models import attention as module
from longtake.models.attention import Attention, check_attention
from longtake.models.attention_kernels import Kernel, attend, attend_backward
from longtake.models.attention_op import attention
from longtake.models.config import Backend
from tests.models import flash_attention_3
from tests.precision import within

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def drawn(tokens: int, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(2, tokens, 4, width, generator=generator, requires_grad=True) for _ in range(3))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqnk,bsnk->bnqs", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bnqs,bsnk->bqnk", weights, v)


def test_every_backend_has_a_name_and_a_kernel() -> None:
    """A kernel that is added in one place alone is noticed here."""
    named = set(get_args(Backend)) - {"auto", "sdpa"}
    assert set(module.KERNEL_NAMES) == named
    assert set(get_args(Kernel)) == named - {"flex"} | {"cpu"}


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash", "math"])
@pytest.mark.parametrize("tokens", [5, 300])
def test_every_backend_of_a_cpu_is_softmax_attention(backend: str, tokens: int) -> None:
    q, k, v = drawn(tokens)
    found, expected = Attention(backend)(q, k, v), exact(q, k, v)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_a_backend_is_the_same_in_a_traced_graph(backend: str) -> None:
    q, k, v = drawn(6)
    compiled = torch.compile(Attention(backend), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), Attention(backend)(q, k, v))


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "flash", "math"])
def test_what_runs_on_a_cpu_is_said_with_dtype_and_head_width(wanted: str) -> None:
    (line,) = check_attention(wanted, CPU, torch.bfloat16, 128)
    assert line.endswith("(bf16, head width 128)")
    assert ("matmul and softmax" in line) == (wanted in ("auto", "math"))


@pytest.mark.parametrize("wanted", ["cudnn", "efficient", "fa3", "flex"])
def test_a_kernel_of_gpus_is_refused_on_a_cpu(wanted: str) -> None:
    with pytest.raises(UserError, match=f"model.attention = '{wanted}': needs a CUDA device .* choose auto, sdpa"):
        check_attention(wanted, CPU, torch.bfloat16, 128)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The choice for a Hopper GPU, its kernels played by the CPU's."""
    probe = module._probe
    monkeypatch.setattr(module, "_probe", lambda device, *rest: probe(CPU, *rest))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if not installed
    return monkeypatch


def test_a_kernel_that_is_not_installed_is_refused_in_a_sentence(hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'fa3': does not run here .* is not installed .* choose auto"):
        check_attention("fa3", CUDA, torch.bfloat16, 128)


def test_a_kernel_that_fails_on_the_device_is_refused_with_its_reason(hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"not run here \(fp32, head width 8\): No viable backend.* choose auto$"):
        check_attention("cudnn", CUDA, torch.float32, 8)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "math"])
def test_auto_is_pytorchs_order_with_and_without_flash_attention_3(hopper: pytest.MonkeyPatch, kernel: str) -> None:
    hopper.setattr(module, "_sdpa_choice", lambda *_: kernel)
    hopper.setattr(module, "slow_on_hopper", lambda *_: None)
    expected = [f"attention: {module.KERNEL_NAMES[kernel]} (bf16, head width 128)"]
    assert check_attention("auto", CUDA, torch.bfloat16, 128) == expected
    flash_attention_3.install(hopper)
    assert check_attention("auto", CUDA, torch.bfloat16, 128) == expected


@pytest.mark.parametrize(("cudnn", "is_refused"), [(91002, True), (91501, False)])
def test_cudnn_that_is_wrong_for_some_lengths_is_refused(
    hopper: pytest.MonkeyPatch, cudnn: int, is_refused: bool
) -> None:
    hopper.setattr(module, "_cudnn", lambda: cudnn)
    fault = module.fault_of("cudnn", CUDA, torch.bfloat16, 128)
    assert ("9.10.2 is wrong for some lengths" in str(fault)) == is_refused


@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_3_is_called_forward_and_backward(hopper: pytest.MonkeyPatch, compiled: bool) -> None:
    calls = flash_attention_3.install(hopper)
    q, k, v = drawn(9)
    attend = torch.compile(Attention("fa3"), backend="aot_eager", fullgraph=True) if compiled else Attention("fa3")
    found, expected = attend(q, k, v), exact(q, k, v)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert calls == ["activated", "forward", "backward"]


def test_flash_attention_3_without_its_kernels_is_refused(hopper: pytest.MonkeyPatch) -> None:
    hopper.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(UserError, match=r"'fa3': does not run here .*does not expose FA3.*; choose auto"):
        check_attention("fa3", CUDA, torch.bfloat16, 128)


def test_flash_attention_3_is_active_for_its_own_calls_and_not_after_a_probe(hopper: pytest.MonkeyPatch) -> None:
    calls = flash_attention_3.install(hopper)
    q, k, v = (x.detach().transpose(1, 2) for x in drawn(9))
    assert module.fault_of("fa3", CUDA, torch.float32, 8) is None
    assert current_flash_attention_impl() is None
    attend(q, k, v, "fa3")
    assert (current_flash_attention_impl(), calls.count("activated")) == ("FA3", 2)
    attend(q, k, v, "fa3")
    assert calls.count("activated") == 2
    with pytest.raises(NotImplementedError):  # a CPU has no FlashAttention-2
        attend(q, k, v, "flash")
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [8, 5])
def test_the_operator_keeps_the_rules_of_operators(dtype: torch.dtype, width: int) -> None:
    """What the compiler is told of shapes, strides and dtypes is so; nothing is an alias or changed; `auto` is what
    PyTorch takes, or products where that takes no kernel, as of no keys."""
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in drawn(9, width))
    for inputs in (
        (q, k, v),
        (q.transpose(0, 1).contiguous().transpose(0, 1), k[:, :4], v[:, :4]),
        (q, k[:, :0], v[:, :0]),
    ):
        torch.library.opcheck(torch.ops.longtake.attention.default, (*inputs, "auto", [], ""))
        found = attention(*inputs, "auto")[0]
        assert torch.equal(found, F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2))


@pytest.mark.parametrize(("which", "width"), [("flash", 64), ("flash", 50), ("cudnn", 64), ("efficient", 72)])
def test_kernels_of_gpus_are_called_as_they_are_declared(which: str, width: int) -> None:
    """On the meta device: what they take and give, not what they compute."""
    q, k, v = (torch.empty(2, 3, tokens, width, dtype=torch.bfloat16, device="meta") for tokens in (37, 41, 41))
    out, lse = attend(q, k, v, which)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = attend_backward(torch.empty_like(out), q, k, v, out, lse, which)
    assert [one.shape for one in found] == [one.shape for one in (q, k, v)]


def test_products_give_the_log_sum_exp_of_a_kernel() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in drawn(300))
    for ours, theirs in zip(attend(q, k, v, "math"), attend(q, k, v, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_cudnn_is_refused_where_a_run_is_to_repeat_itself(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UserError, match=r"'cudnn': its backward does not repeat itself, .* choose auto"):
        check_attention("cudnn", CUDA, torch.bfloat16, 128)


@pytest.mark.parametrize(
    ("chosen", "cuda", "cudnn", "wheel", "said"),
    [
        ("cudnn", "12.6", 91002, None, None),
        ("flash", "12.6", 91600, 91600, "CUDA is 12.6 .* needs 12.9"),
        ("flash", "13.0", 91002, 91002, r"cuDNN 9.10.2 is wrong .*; pip install 'nvidia-cudnn-cu13>=9.15.1'$"),
        ("flash", "13.0", 91002, 91600, "cuDNN 9.10.2 is loaded in place of PyTorch's 9.16.0; .*LD_LIBRARY_PATH"),
        ("flash", "13.0", 91600, 91600, None),
    ],
)
def test_why_a_hopper_gpu_is_left_on_flash_attention_2(
    hopper: pytest.MonkeyPatch, chosen: str, cuda: str, cudnn: int, wheel: int | None, said: str | None
) -> None:
    hopper.setattr(torch.version, "cuda", cuda)
    hopper.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    hopper.setattr(module, "_release", lambda package: wheel)
    hopper.setattr(module, "_sdpa_choice", lambda *_: chosen)
    lines = check_attention("auto", CUDA, torch.bfloat16, 128)
    assert (len(lines) == 1) if said is None else re.search(said, lines[1])
    hopper.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert len(check_attention("auto", CUDA, torch.bfloat16, 128)) == 1  # cuDNN is left out on purpose


def assert_is_softmax_attention(backend: str, device: torch.device, width: int, keys: int) -> None:
    """In bf16, against float64: results and gradients."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(2, rows, 4, width, generator=generator) for rows in (300, keys, keys))
    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in numbers)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    found, expected = Attention(backend)(q, k, v), exact(*doubles)
    gradients = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), doubles)
    limit = 5e-2 if backend == "math" else 2e-2  # it has its scores in bf16, and is off by 2.3e-2 on a CPU
    for ours, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        assert within((ours.double() - theirs).abs().max(), limit * theirs.abs().max())


@pytest.mark.parametrize(("width", "keys"), [(64, 300), (128, 512)], ids=["self", "cross"])
@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_kernels_of_a_cpu_are_softmax_attention_in_bf16(backend: str, width: int, keys: int) -> None:
    assert_is_softmax_attention(backend, CPU, width, keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("width", "keys"), [(64, 300), (128, 512)], ids=["self", "cross"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash", "cudnn", "efficient", "math", "fa3", "flex"])
def test_every_kernel_of_a_gpu_is_softmax_attention_or_says_why_not(backend: str, width: int, keys: int) -> None:
    """Over the sequence itself, and to text, as Wan's blocks have it."""
    try:
        check_attention(backend, CUDA, torch.bfloat16, width)
    except UserError as error:
        if backend not in ("cudnn", "fa3", "flex"):  # these need a package, a release or a generation of GPUs
            raise
        pytest.skip(str(error))
    assert_is_softmax_attention(backend, CUDA, width, keys)
