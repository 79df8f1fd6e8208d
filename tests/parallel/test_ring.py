"""Blocks of keys, merged, are whole attention: results and gradients, whichever kernel attends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtake.models.attention_kernels import attend_block, attend_block_backward, kernel_of_block
from longtake.parallel.ring import merge
from tests.models import flash_attention_3
from tests.precision import rounding, within


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Result and gradients of q, k, v, block by block, as the ring computes them."""
    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:-1], -torch.inf)
    pairs = list(zip(k.split(sizes, 2), v.split(sizes, 2), strict=True))
    for keys, values in pairs:
        part, part_lse = attend_block(q, keys, values)
        out, lse = merge(out, lse, part.float(), part_lse)
    parts = [attend_block_backward(grad, q, keys, values, out.to(q.dtype), lse) for keys, values in pairs]
    dk, dv = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
    return out, sum(part[0] for part in parts), dk, dv


@pytest.mark.parametrize("which", ["cpu", "math", "fa3"])
@pytest.mark.parametrize("sizes", [[7], [3, 4], [1, 5, 1]])
def test_blocks_make_up_whole_attention(monkeypatch: pytest.MonkeyPatch, which: str, sizes: list[int]) -> None:
    monkeypatch.setattr("longtake.models.attention_kernels.kernel_of_block", lambda q, backend: which)
    monkeypatch.setattr("longtake.models.attention_kernels._CHUNK_BYTES", 200)  # several chunks of queries
    flash_attention_3.install(monkeypatch)
    q, k, v = (drawn(2, 3, rows, 8, seed=rows + i).requires_grad_() for i, rows in enumerate((5, 7, 7)))
    grad = drawn(2, 3, 5, 8, seed=9)
    expected = F.scaled_dot_product_attention(q, k, v)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        found = by_blocks(q, k, v, grad, sizes)
    for ours, theirs in zip(found, (expected, *gradients), strict=True):
        bound = rounding(float(theirs.abs().max()), steps=8 + 7)  # a score adds 8 products, and a result 7 of them
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("chosen", "dtype", "runs"),
    [
        *((kernel, torch.bfloat16, kernel) for kernel in ("flash", "cudnn", "fa3", "efficient", "math")),
        ("auto", torch.bfloat16, "flash"),
        ("efficient", torch.float32, "efficient"),
        ("auto", torch.float32, "math"),
    ],
)
def test_a_ring_of_gpus_runs_what_was_chosen_for_the_run(chosen: str, dtype: torch.dtype, runs: str) -> None:
    """All kernels give the log-sum-exp; the meta device stands for CUDA."""
    q = torch.empty(1, 2, 4, 64, dtype=dtype, device="meta")
    assert kernel_of_block(q, chosen) == runs
    if runs not in ("fa3", "math"):
        out, lse = attend_block(q, q, q, chosen)
        assert [one.shape for one in attend_block_backward(out, q, q, q, out, lse, chosen)] == [q.shape] * 3


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    q, k, v = 30 * drawn(1, 1, 4, 8), 30 * drawn(1, 1, 6, 8, seed=1), drawn(1, 1, 6, 8, seed=2)
    out, *gradients = by_blocks(q, k, v, torch.ones(1, 1, 4, 8), [2, 2, 2])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-6, rtol=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_make_up_whole_attention_on_cuda(dtype: torch.dtype) -> None:
    shapes = (96, 160, 160)
    q, k, v = (drawn(2, 3, n, 64, seed=i).cuda().to(dtype).requires_grad_() for i, n in enumerate(shapes))
    grad = drawn(2, 3, 96, 64, seed=9).cuda().to(dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*exact)
    gradients = torch.autograd.grad(expected, exact, grad.double())
    with torch.no_grad(), torch.device("cuda"):
        found = by_blocks(q, k, v, grad, [100, 60])
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, theirs in zip(found, (expected, *gradients), strict=True):
        assert within((ours.double() - theirs).abs().max(), limit * theirs.abs().max())
