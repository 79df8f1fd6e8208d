"""Triton kernels of the operators in `fused`, whose formulas they follow: each reads its inputs and writes its results
once. Sums, norms and angles are in float32.

Heads: one program for a token, with all its heads; in backward for some tokens, whose sums for a norm's numbers it
writes as one row. Channels that turn together lie in two blocks, a and b; either is filled up to a power of 2.
Gates and norms over the width: one program for some rows of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 8  # of a program in backward
_PROGRAMS, _MOST_ROWS = 1024, 64  # programs that rows are dealt to, and how many rows one takes at most


@triton.jit
def _read(base, step, rows, K: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """a and b of rows of K channels, [ROWS, HALF] each in float32, zero where there is nothing."""
    row = tl.arange(0, ROWS)[:, None]
    if PAIRS:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(base + row * step + column, mask=(row < rows) & (column < K), other=0.0)
        a, b = tl.split(tl.reshape(both, (ROWS, HALF, 2)))
    else:
        column = tl.arange(0, HALF)[None, :]
        there = (row < rows) & (column < K // 2)
        a = tl.load(base + row * step + column, mask=there, other=0.0)
        b = tl.load(base + row * step + column + K // 2, mask=there, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _write(a, b, base, step, rows, K: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    kind = base.dtype.element_ty
    if PAIRS:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(a, b), (ROWS, 2 * HALF)).to(kind)
        tl.store(base + row * step + column, both, mask=(row < rows) & (column < K))
    else:
        column = tl.arange(0, HALF)[None, :]
        there = (row < rows) & (column < K // 2)
        tl.store(base + row * step + column, a.to(kind), mask=there)
        tl.store(base + row * step + column + K // 2, b.to(kind), mask=there)


@triton.jit
def _normed(a, b, eps, K: tl.constexpr, HALF: tl.constexpr, CENTRED: tl.constexpr):
    """a and b of a row over its length, for `CENTRED` less its mean; and one over the length."""
    if CENTRED:
        there = (tl.arange(0, HALF) < K // 2)[None, :]
        mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / K)[:, None]
        a, b = tl.where(there, a - mean, 0.0), tl.where(there, b - mean, 0.0)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / K + eps)[:, None]
    return a * inverse, b * inverse, inverse


@triton.jit
def _angles(table, to_sines, K: tl.constexpr, HALF: tl.constexpr):
    column = tl.arange(0, HALF)
    cos = tl.load(table + column, mask=column < K // 2, other=1.0)
    sin = tl.load(table + to_sines + column, mask=column < K // 2, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def join_heads(
    x, weight, bias, table, out, xb, xl, xp, xn, ob, ol, op, on, to_row, to_sines, tokens, places, heads, eps,
    K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr, CENTRED: tl.constexpr,
    TURNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """x -> out, both [B, tokens, places, N, K] with the strides that follow."""
    program = tl.program_id(0).to(tl.int64)
    place, token, sample = program % places, program // places % tokens, program // (places * tokens)
    a, b = _read(x + sample * xb + token * xl + place * xp, xn, heads, K, HALF, HEADS, PAIRS)
    if NORMED:
        a, b, _ = _normed(a, b, eps, K, HALF, CENTRED)
        wa, wb = _read(weight, 0, 1, K, HALF, 1, PAIRS)
        a, b = a * wa, b * wb
        if CENTRED:
            ca, cb = _read(bias, 0, 1, K, HALF, 1, PAIRS)
            a, b = a + ca, b + cb
    if TURNED:
        cos, sin = _angles(table + token * to_row, to_sines, K, HALF)
        a, b = a * cos - b * sin, b * cos + a * sin
    _write(a, b, out + sample * ob + token * ol + place * op, on, heads, K, HALF, HEADS, PAIRS)


@triton.jit
def join_heads_backward(
    grad, x, weight, table, dx, sums, gb, gl, gp, gn, xb, xl, xp, xn, db, dl, dp, dn, to_row, to_sines, tokens, places,
    heads, total, eps, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr,
    CENTRED: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr, LEARNED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """grad -> dx, and a row [weight's a, b, bias's a, b] of `sums`."""
    of_wa, of_wb = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    of_ca, of_cb = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for i in range(TOKENS):
        number = tl.program_id(0).to(tl.int64) * TOKENS + i
        rows = tl.where(number < total, heads, 0)
        place, token, sample = number % places, number // places % tokens, number // (places * tokens)
        a, b = _read(grad + sample * gb + token * gl + place * gp, gn, rows, K, HALF, HEADS, PAIRS)
        if TURNED:
            cos, sin = _angles(table + tl.where(number < total, token, 0) * to_row, to_sines, K, HALF)
            a, b = a * cos + b * sin, b * cos - a * sin
        if NORMED:
            na, nb = _read(x + sample * xb + token * xl + place * xp, xn, rows, K, HALF, HEADS, PAIRS)
            na, nb, inverse = _normed(na, nb, eps, K, HALF, CENTRED)
            of_wa += tl.sum(a * na, 0)
            of_wb += tl.sum(b * nb, 0)
            if CENTRED:
                of_ca += tl.sum(a, 0)
                of_cb += tl.sum(b, 0)
            wa, wb = _read(weight, 0, 1, K, HALF, 1, PAIRS)
            a, b = a * wa, b * wb
            along = ((tl.sum(a * na, 1) + tl.sum(b * nb, 1)) / K)[:, None]
            mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / K)[:, None] if CENTRED else 0.0
            a, b = (a - mean - na * along) * inverse, (b - mean - nb * along) * inverse
        _write(a, b, dx + sample * db + token * dl + place * dp, dn, rows, K, HALF, HEADS, PAIRS)
    if LEARNED:
        sums += tl.program_id(0) * 4 * HALF + tl.arange(0, HALF)
        tl.store(sums, of_wa)
        tl.store(sums + HALF, of_wb)
        tl.store(sums + 2 * HALF, of_ca)
        tl.store(sums + 3 * HALF, of_cb)


@triton.jit
def gate_norm(
    x, y, gate, scale, shift, added, out, xg, xr, yg, yr, ag, ar, og, ro, length, rows, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Rows [G, length, D]: added = x + gate y, out = LayerNorm(added) scale + shift; of either what is asked for."""
    group, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * rows
    column = tl.arange(0, WIDTH)
    there = column < D
    if GATED:
        of_y = tl.load(gate + group * D + column, mask=there, other=0.0)
    if NORMED:
        factor = tl.load(scale + group * D + column, mask=there, other=0.0)
        offset = tl.load(shift + group * D + column, mask=there, other=0.0)
    for row in range(first, tl.minimum(first + rows, length)):
        value = tl.load(x + group * xg + row * xr + column, mask=there, other=0.0).to(tl.float32)
        if GATED:
            value += of_y * tl.load(y + group * yg + row * yr + column, mask=there, other=0.0).to(tl.float32)
            kept = value.to(added.dtype.element_ty)
            tl.store(added + group * ag + row * ar + column, kept, mask=there)
            value = kept.to(tl.float32)  # as backward will find it
        if NORMED:
            centred = tl.where(there, value - tl.sum(value, 0) / D, 0.0)
            inverse = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
            value = centred * inverse * factor + offset
            tl.store(out + group * og + row * ro + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def gate_norm_backward(
    of_added, of_out, x, y, gate, scale, dx, dy, sums, ag, ar, og, ro, xg, xr, yg, yr, dg, dr, eg, er, length, rows,
    eps, D: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, PASSED: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """dx and dy; `sums` of a program, [gate, scale, shift]. x: what is normed; PASSED: `added` has a gradient."""
    group, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * rows
    column = tl.arange(0, WIDTH)
    there = column < D
    of_gate, of_scale, of_shift = (
        tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    )  # fmt: skip
    if GATED:
        of_y = tl.load(gate + group * D + column, mask=there, other=0.0)
    if NORMED:
        factor = tl.load(scale + group * D + column, mask=there, other=0.0)
    for row in range(first, tl.minimum(first + rows, length)):
        total = tl.zeros((WIDTH,), tl.float32)
        if PASSED:
            total += tl.load(of_added + group * ag + row * ar + column, mask=there, other=0.0).to(tl.float32)
        if NORMED:
            value = tl.load(x + group * xg + row * xr + column, mask=there, other=0.0).to(tl.float32)
            centred = tl.where(there, value - tl.sum(value, 0) / D, 0.0)
            inverse = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
            normed = centred * inverse
            grad = tl.load(of_out + group * og + row * ro + column, mask=there, other=0.0).to(tl.float32)
            of_scale += grad * normed
            of_shift += grad
            grad *= factor
            total += (grad - tl.sum(grad, 0) / D - normed * (tl.sum(grad * normed, 0) / D)) * inverse
            tl.store(dx + group * dg + row * dr + column, total.to(dx.dtype.element_ty), mask=there)
        if GATED:
            value = tl.load(y + group * yg + row * yr + column, mask=there, other=0.0).to(tl.float32)
            of_gate += total * value
            tl.store(dy + group * eg + row * er + column, (total * of_y).to(dy.dtype.element_ty), mask=there)
    if LEARNED:
        sums += (group * tl.num_programs(0) + tl.program_id(0)) * 3 * D + column
        tl.store(sums, of_gate, mask=there)
        tl.store(sums + D, of_scale, mask=there)
        tl.store(sums + 2 * D, of_shift, mask=there)


def join(
    parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], rope: Tensor | None, pairs: bool,
    eps: float,
) -> Tensor:  # fmt: skip
    """As `fused.join`."""
    shape, start = list(parts[0].shape), 0
    shape[1] = sum(part.shape[1] for part in parts)
    out = parts[0].new_empty(shape)
    for i, part in enumerate(parts):
        length = part.shape[1]
        x, there = _by_places(part), _by_places(out[:, start : start + length])
        sizes = _sizes(x, bool(weights), bool(biases), rope, pairs)
        weight, bias = (one[i] if one else None for one in (weights, biases))
        table = _table(rope, start)
        _launch(
            join_heads, (x.shape[:3].numel(),), x, weight, bias, table[0], there, *x.stride()[:4], *there.stride()[:4],
            *table[1:], *x.shape[1:4], eps, **sizes,
        )  # fmt: skip
        start += length
    return out


def join_backward(
    grad: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor],
    rope: Tensor | None, pairs: bool, eps: float, learned: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """As `fused.join_backward`."""
    start, found = 0, ([], [], [])
    for i, length in enumerate(lengths):
        given = _by_places(grad[:, start : start + length])
        x = _by_places(parts[i]) if parts else given
        found[0].append(dx := grad.new_empty((grad.shape[0], length, *grad.shape[2:])))
        there, total = _by_places(dx), given.shape[:3].numel()
        sizes = _sizes(given, bool(weights), bool(biases), rope, pairs)
        programs = -(-total // _TOKENS)
        sums = grad.new_empty(programs, 2, 2, sizes["HALF"], dtype=torch.float32) if learned else None
        table = _table(rope, start)
        _launch(
            join_heads_backward, (programs,), given, x, weights[i] if weights else None, table[0], there, sums,
            *given.stride()[:4], *x.stride()[:4], *there.stride()[:4], *table[1:], *given.shape[1:4], total, eps,
            **sizes, LEARNED=learned, TOKENS=_TOKENS,
        )  # fmt: skip
        if sums is not None:
            halves = sums.sum(0)[:, :, : sizes["K"] // 2]
            of_norm = (halves.mT if sizes["PAIRS"] else halves).flatten(1)
            for of, like, all_found in zip(of_norm, (weights, biases), found[1:], strict=True):
                all_found.extend([of.to(like[i].dtype, copy=True)] if like else [])
        start += length
    return found


def _by_places(x: Tensor) -> Tensor:
    """[B, tokens, places, N, K], channels side by side."""
    x = x if x.dim() == 5 else x.unsqueeze(2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _table(rope: Tensor | None, start: int) -> tuple[Tensor | None, int, int]:
    """From token `start` on, with the steps to the next token and to the sines."""
    if rope is None:
        return None, 0, 0
    table = rope.flatten(1, -2).contiguous()[:, start:]
    return table, table.stride(1), table.stride(0)


def _sizes(x: Tensor, normed: bool, centred: bool, rope: Tensor | None, pairs: bool) -> dict[str, Any]:
    heads, width = x.shape[3:]
    half, rows = triton.next_power_of_2(width // 2), triton.next_power_of_2(heads)
    return {
        "K": width, "HALF": half, "HEADS": rows, "NORMED": normed, "CENTRED": centred, "TURNED": rope is not None,
        "PAIRS": pairs and rope is not None, "num_warps": max(1, min(8, rows * half // 256)),
    }  # fmt: skip


def gate(
    x: Tensor, y: Tensor | None, gates: Tensor | None, scale: Tensor | None, shift: Tensor | None, runs: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `fused.gate`."""
    added = x.new_empty(x.shape if y is not None else 0)
    out = x.new_empty(x.shape if scale is not None else 0)
    start = 0
    for i, length in enumerate(runs):
        rows = _rows(x, length)
        of_run = [_run(one, start, length) for one in (x, y, added, out)]
        numbers = [_kind(one, i) for one in (gates, scale, shift)]
        _launch(
            gate_norm, (-(-length // rows), x.shape[0]), *of_run[:2], *numbers, *of_run[2:], *_steps(of_run), length,
            rows, eps, **_width(x, y, scale, 512),
        )  # fmt: skip
        start += length
    return added, out


def gate_backward(
    of_added: Tensor | None, of_out: Tensor | None, x: Tensor | None, y: Tensor | None, gates: Tensor | None,
    scale: Tensor | None, runs: Sequence[int], eps: float, learned: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `fused.gate_backward`."""
    like = of_added if of_out is None else of_out
    numbers = gates if scale is None else scale
    dx = like.new_empty(like.shape if scale is not None else 0)
    dy = like.new_empty(like.shape if y is not None else 0)
    of_numbers = numbers.new_zeros(3, *numbers.shape if learned else (0,))
    start = 0
    for i, length in enumerate(runs):
        rows = _rows(like, length)
        programs = -(-length // rows)
        of_run = [_run(one, start, length) for one in (of_added, of_out, x, y, dx, dy)]
        sums = numbers.new_empty(like.shape[0], programs, 3, like.shape[-1]) if learned else None
        _launch(
            gate_norm_backward, (programs, like.shape[0]), *of_run[:4], _kind(gates, i), _kind(scale, i), *of_run[4:],
            sums, *_steps(of_run), length, rows, eps, PASSED=of_added is not None, LEARNED=learned,
            **_width(like, y, scale, 256),
        )  # fmt: skip
        if sums is not None:
            of_numbers[:, i % numbers.shape[0]] += sums.sum(1).transpose(0, 1)
        start += length
    return dx, dy, of_numbers


def _rows(x: Tensor, length: int) -> int:
    """How many a program takes."""
    return max(1, min(_MOST_ROWS, -(-x.shape[0] * length // _PROGRAMS)))


def _run(x: Tensor | None, start: int, length: int) -> Tensor | None:
    if x is None or not x.numel():
        return None
    return (x if x.stride(-1) == 1 else x.contiguous())[:, start : start + length]


def _kind(numbers: Tensor | None, run: int) -> Tensor | None:
    return None if numbers is None else numbers[run % numbers.shape[0]]


def _steps(tensors: Sequence[Tensor | None]) -> list[int]:
    return [step for x in tensors for step in ((0, 0) if x is None else x.stride()[:2])]


def _width(x: Tensor, y: Tensor | None, scale: Tensor | None, numbers_of_a_warp: int) -> dict[str, Any]:
    width = triton.next_power_of_2(x.shape[-1])
    warps = max(1, min(16, width // numbers_of_a_warp))
    return {"D": x.shape[-1], "WIDTH": width, "GATED": y is not None, "NORMED": scale is not None, "num_warps": warps}


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor | None, *rest: Any, **named: Any) -> None:
    on = next(one for one in (first, *rest) if isinstance(one, Tensor))
    if all(grid):
        with torch.cuda.device_of(on):
            kernel[grid](first, *rest, **named)
