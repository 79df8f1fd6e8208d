"""Triton kernels of attention over time: one program for a place and head, which holds all of its frames.

A video has thousands of places and few frames. Kernels for long sequences would copy it to bring the frames together
and fill tiles of 64 or 128 rows by a part; these read and write it where it lies, and know the softmax of a row whole.
Backward makes the weights again from queries and keys.

Heads may have any even width: K channels lie in a block of the largest power of 2 and one of 16 or more with the rest
(72 in 64 + 16, not in 128). Products are of factors in q's dtype, sums in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _start(base, places, heads, of_sample, of_place, of_head):
    """Where a program's first frame lies."""
    program = tl.program_id(0).to(tl.int64)
    place = (program // heads) % places
    return base + (program // (heads * places)) * of_sample + place * of_place + (program % heads) * of_head


@triton.jit
def _part(base, of_frame, frames, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Where channels from FIRST on of all frames are, and which of them there are."""
    rows, columns = tl.arange(0, ROWS), FIRST + tl.arange(0, WIDTH)
    there = (rows < frames)[:, None] & (columns < K)[None, :]
    return base + rows.to(tl.int64)[:, None] * of_frame + columns[None, :], there


@triton.jit
def _read(base, of_frame, frames, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    where, there = _part(base, of_frame, frames, FIRST, WIDTH, K, ROWS)
    return tl.load(where, mask=there, other=0.0)


@triton.jit
def _write(x, base, of_frame, frames, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    where, there = _part(base, of_frame, frames, FIRST, WIDTH, K, ROWS)
    tl.store(where, x.to(base.dtype.element_ty), mask=there)


@triton.jit
def _dot(x, y, like):
    factors = like.dtype.element_ty
    return tl.dot(x.to(factors), y.to(factors), input_precision="ieee")


@triton.jit
def _weights(scores, frames, ROWS: tl.constexpr):
    """The softmax of each row over the frames that there are."""
    scores = tl.where((tl.arange(0, ROWS) < frames)[None, :], scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, 1)[:, None])
    return shares / tl.sum(shares, 1)[:, None]


@triton.jit
def attend(
    q, k, v, out, qb, qf, qs, qn, kb, kf, ks, kn, vb, vf, vs, vn, ob, of, os, on, frames, places, heads, scale,
    ROWS: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """q, k, v -> out, each [B, F, S, N, K] with the strides that follow it."""
    q, k = _start(q, places, heads, qb, qs, qn), _start(k, places, heads, kb, ks, kn)
    v, out = _start(v, places, heads, vb, vs, vn), _start(out, places, heads, ob, os, on)
    scores = _dot(_read(q, qf, frames, 0, MOST, K, ROWS), _read(k, kf, frames, 0, MOST, K, ROWS).trans(), q)
    if REST > 0:
        more = _read(k, kf, frames, MOST, REST, K, ROWS).trans()
        scores += _dot(_read(q, qf, frames, MOST, REST, K, ROWS), more, q)
    shares = _weights(scores * scale, frames, ROWS)
    _write(_dot(shares, _read(v, vf, frames, 0, MOST, K, ROWS), q), out, of, frames, 0, MOST, K, ROWS)
    if REST > 0:
        rest = _dot(shares, _read(v, vf, frames, MOST, REST, K, ROWS), q)
        _write(rest, out, of, frames, MOST, REST, K, ROWS)


@triton.jit
def _gradients(
    shares, of_scores, q, k, grad, dq, dk, dv, qf, kf, gf, df, frames,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of some channels."""
    of_out = _read(grad, gf, frames, FIRST, WIDTH, K, ROWS)
    _write(_dot(shares.trans(), of_out, q), dv, df, frames, FIRST, WIDTH, K, ROWS)
    of_q = _dot(of_scores, _read(k, kf, frames, FIRST, WIDTH, K, ROWS), q)
    _write(of_q, dq, df, frames, FIRST, WIDTH, K, ROWS)
    of_k = _dot(of_scores.trans(), _read(q, qf, frames, FIRST, WIDTH, K, ROWS), q)
    _write(of_k, dk, df, frames, FIRST, WIDTH, K, ROWS)


@triton.jit
def attend_backward(
    grad, q, k, v, dq, dk, dv, gb, gf, gs, gn, qb, qf, qs, qn, kb, kf, ks, kn, vb, vf, vs, vn, db, df, ds, dn,
    frames, places, heads, scale, ROWS: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The gradients dq, dk, dv, alike in strides."""
    q, k = _start(q, places, heads, qb, qs, qn), _start(k, places, heads, kb, ks, kn)
    v, grad = _start(v, places, heads, vb, vs, vn), _start(grad, places, heads, gb, gs, gn)
    dq, dk = _start(dq, places, heads, db, ds, dn), _start(dk, places, heads, db, ds, dn)
    dv = _start(dv, places, heads, db, ds, dn)
    scores = _dot(_read(q, qf, frames, 0, MOST, K, ROWS), _read(k, kf, frames, 0, MOST, K, ROWS).trans(), q)
    of_shares = _dot(_read(grad, gf, frames, 0, MOST, K, ROWS), _read(v, vf, frames, 0, MOST, K, ROWS).trans(), q)
    if REST > 0:
        more = _read(k, kf, frames, MOST, REST, K, ROWS).trans()
        scores += _dot(_read(q, qf, frames, MOST, REST, K, ROWS), more, q)
        more = _read(v, vf, frames, MOST, REST, K, ROWS).trans()
        of_shares += _dot(_read(grad, gf, frames, MOST, REST, K, ROWS), more, q)
    shares = _weights(scores * scale, frames, ROWS)
    of_scores = shares * (of_shares - tl.sum(shares * of_shares, 1)[:, None]) * scale
    _gradients(shares, of_scores, q, k, grad, dq, dk, dv, qf, kf, gf, df, frames, 0, MOST, K, ROWS)
    if REST > 0:
        _gradients(shares, of_scores, q, k, grad, dq, dk, dv, qf, kf, gf, df, frames, MOST, REST, K, ROWS)


def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the frames at each place: q, k, v and the result are [B, F, S, N, K]."""
    q, k, v = map(_in_rows, (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(attend, (q, k, v, out), (q, k, v, out))
    return out


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    grad, q, k, v = map(_in_rows, (grad, q, k, v))
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    _launch(attend_backward, (grad, q, k, v, dq, dk, dv), (grad, q, k, v, dq))
    return dq, dk, dv


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(kernel: object, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...]) -> None:
    samples, frames, places, heads, width = tensors[0].shape
    sizes = blocks_of(frames, width)
    warps = min(8, max(2, sizes["ROWS"] // 8))  # with fewer, registers spill
    strides = [step for x in strided for step in x.stride()[:4]]
    if samples * places:
        grid = (samples * places * heads,)
        kernel[grid](*tensors, *strides, frames, places, heads, width**-0.5, **sizes, num_warps=warps)


def blocks_of(frames: int, width: int) -> dict[str, int]:
    """The sizes of a program's blocks."""
    most = 1 << (width.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(width - most)) if width > most else 0
    return {"ROWS": max(16, triton.next_power_of_2(frames)), "K": width, "MOST": max(16, most), "REST": rest}
