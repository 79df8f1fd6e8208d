"""Norms, rotations and gates of a block as operators of their own, which read and write each tensor once.

Triton's kernels (`fused_kernels`) run them on CUDA, elsewhere the same formulas in PyTorch. A block uses them where
`use` says so, which a run does as far as they have proved faster on its GPU than what the compiler makes of PyTorch's
own operations (`train.choices`); without that it computes by those.

With n = (x - m) r, where m is the mean of a row and r = 1 / sqrt(var + eps) (LayerNorm, arXiv 1607.06450; m = 0 and
the mean square in place of the variance for RMSNorm, 1910.07467), gradients are written dz for one of z:

    z = n w + c               dw = sum dz n, dc = sum dz, over all rows that share w and c; with dn = dz w
                              dx = r (dn - mean(dn) - n mean(dn n)); without mean(dn) for RMSNorm
    z = R(angle) x            dx = R(-angle) dz                  (rotary positions, 2104.09864)
    h = x + g y               dx = dh, dy = g dh, dg = sum dh y  (gates and modulation as in adaLN, 2212.09748)

Statistics are made again in backward from the input, which is kept: rows are at hand there as wholes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from longtake.models.rotations import turned

NAMES = ("heads", "modulate", "gate", "gate_modulate", "project", "project_out")  # the last two: `projections`
_used: frozenset[str] = frozenset()


def use(names: Collection[str]) -> None:
    """From now on blocks of this process compute these of `NAMES` by the operators here, and all else without."""
    global _used
    assert set(names) <= set(NAMES), names
    _used = frozenset(names)


def uses(name: str) -> bool:
    return name in _used


def used() -> tuple[str, ...]:
    return tuple(sorted(_used))


def runs_here(device: torch.device) -> bool:
    """Whether there are kernels for this device."""
    return device.type == "cuda" and find_spec("triton") is not None


def join_heads(
    parts: Sequence[Tensor], norms: Sequence[tuple[Tensor, Tensor | None, float]], rope: Tensor | None, pairs: bool
) -> Tensor:
    """Heads [B, l, N, K] of several streams, normed over K and rotated, one behind the other: [B, S, N, K].

    `norms`: weight [K], bias [K] or None, and eps of every part, or empty for no norm; with biases LayerNorm, else
    RMSNorm, the same for all parts. `rope`: fp32 [2, S, 1, K/2], in which text has the angle zero; `pairs`: channels
    (2j, 2j + 1) turn together, not (j, K/2 + j). There may be a dim of places behind that of tokens, which share a
    token's angles.
    """
    assert len(norms) in (0, len(parts)), "all parts are normed, or none"
    assert len({(bias is None, eps) for _, bias, eps in norms}) <= 1, "one norm and one eps for all parts"
    weights, biases = [norm[0] for norm in norms], [norm[1] for norm in norms if norm[1] is not None]
    return _join(list(parts), weights, biases, rope, pairs, norms[0][2] if norms else 0.0)


def gate_norm(
    x: Tensor,
    gated: tuple[Tensor, Sequence[Tensor]] | None,
    numbers: Sequence[tuple[Tensor, Tensor]],
    runs: Sequence[int] = (),
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """x + gate * y, and LayerNorm of that (of x where nothing is `gated`) * scale + shift.

    x [..., R, D]; `gated`: y and its gates; `numbers`: scales and shifts; none: no norm. Each [..., 1, D], one for each
    kind of rows; `runs`: lengths of runs of rows, whose kinds come in turn, by default one of all.
    """
    rows = x.flatten(0, -3)

    def stacked(of_kinds: Sequence[Tensor]) -> Tensor:
        shape, dtype = (*x.shape[:-2], 1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        return torch.stack([one.to(dtype).expand(shape).reshape(rows.shape[0], x.shape[-1]) for one in of_kinds])

    y, gates = (None, None) if gated is None else (gated[0].flatten(0, -3), stacked(gated[1]))
    scale, shift = map(stacked, zip(*numbers, strict=True)) if numbers else (None, None)
    added, out = _gate(rows, y, gates, scale, shift, list(runs) or [x.shape[-2]], eps)
    return _shaped(added, x) if gated else x, _shaped(out, x) if numbers else out


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Not as a view where it has the shape already: FSDP2 warns of a block that returns one."""
    return rows if rows.shape == like.shape else rows.view(like.shape)


@torch.library.custom_op("longtake::join_heads", mutates_args=())
def _join(
    parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], rope: Tensor | None, pairs: bool,
    eps: float,
) -> Tensor:  # fmt: skip
    return _body(parts[0]).join(parts, weights, biases, rope, pairs, eps)


@torch.library.custom_op("longtake::join_heads_backward", mutates_args=())
def _join_backward(
    grad: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor],
    rope: Tensor | None, pairs: bool, eps: float, learned: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the parts, then, where they are learned, of weights and biases."""
    body = _body(grad)
    found = body.join_backward(grad, parts, lengths, weights, biases, rope, pairs, eps, learned)
    return [one for of_kind in found for one in of_kind]


@_join.register_fake
def _(parts: Sequence[Tensor], *rest: Any) -> Tensor:
    first = parts[0]
    return first.new_empty(first.shape[0], sum(part.shape[1] for part in parts), *first.shape[2:])


@_join_backward.register_fake
def _(grad: Tensor, parts: Any, lengths: Sequence[int], weights: Any, biases: Any, *rest: Any) -> list[Tensor]:
    own = [grad.new_empty(grad.shape[0], length, *grad.shape[2:]) for length in lengths]
    return own + [one.new_empty(one.shape) for one in (*weights, *biases) if rest[-1]]


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, weights, biases, rope, ctx.pairs, ctx.eps = inputs
    ctx.lengths, ctx.counts = [part.shape[1] for part in parts], (len(weights), len(biases))
    ctx.save_for_backward(rope, *weights, *biases, *(parts if weights else ()))


def _heads_differentiated(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rope, *saved = ctx.saved_tensors
    weights, biases = saved[: ctx.counts[0]], saved[ctx.counts[0] : sum(ctx.counts)]
    if not weights and rope is None:
        return list(grad.split(ctx.lengths, 1)), [], [], None, None, None
    learned = any((*ctx.needs_input_grad[1], *ctx.needs_input_grad[2]))
    how = weights, biases, rope, ctx.pairs, ctx.eps, learned
    found = _join_backward(grad, saved[sum(ctx.counts) :], ctx.lengths, *how)
    count, found = len(ctx.lengths), [*found, *[None] * (0 if learned else sum(ctx.counts))]
    return found[:count], found[count : count + len(weights)], found[count + len(weights) :], None, None, None


_join.register_autograd(_heads_differentiated, setup_context=_save_heads)


@torch.library.custom_op("longtake::gate_norm", mutates_args=())
def _gate(
    x: Tensor, y: Tensor | None, gates: Tensor | None, scale: Tensor | None, shift: Tensor | None, runs: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x, y [G, R, D], numbers [kinds, G, D]; what is not asked for is empty."""
    return _body(x).gate(x, y, gates, scale, shift, runs, eps)


@torch.library.custom_op("longtake::gate_norm_backward", mutates_args=())
def _gate_backward(
    of_added: Tensor | None, of_out: Tensor | None, x: Tensor | None, y: Tensor | None, gates: Tensor | None,
    scale: Tensor | None, runs: Sequence[int], eps: float, learned: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x where there is a norm, of y, and of gates, scales and shifts [3, kinds, G, D]; else empty."""
    body = _body(of_added if of_out is None else of_out)
    return body.gate_backward(of_added, of_out, x, y, gates, scale, runs, eps, learned)


@_gate.register_fake
def _(x: Tensor, y: Tensor | None, gates: Any, scale: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(0 if one is None else x.shape) for one in (y, scale))


@_gate_backward.register_fake
def _(
    of_added: Tensor | None, of_out: Tensor | None, x: Any, y: Tensor | None, gates: Any, scale: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    like, numbers = of_added if of_out is None else of_out, gates if scale is None else scale
    dx, dy = (like.new_empty(0 if one is None else like.shape) for one in (scale, y))
    return dx, dy, numbers.new_empty(3, *numbers.shape if rest[-1] else (0,))


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    x, y, gates, scale, _, ctx.runs, ctx.eps = inputs
    normed = None if scale is None else x if y is None else output[0]
    ctx.save_for_backward(normed, y, gates, scale)


def _gate_differentiated(ctx: Any, of_added: Tensor | None, of_out: Tensor | None) -> tuple[Tensor | None, ...]:
    x, y, gates, scale = ctx.saved_tensors
    of_added, of_out = of_added if y is not None else None, of_out if scale is not None else None
    if of_added is None and of_out is None:
        return (None,) * 7
    if of_out is None:
        x = scale = None
    learned = any(ctx.needs_input_grad[2:5])
    dx, dy, numbers = _gate_backward(of_added, of_out, x, y, gates, scale, ctx.runs, ctx.eps, learned)
    of_gates, of_scale, of_shift = numbers if learned else (None,) * 3
    return (
        of_added if scale is None else dx,
        None if y is None else dy,
        None if gates is None else of_gates,
        *((None, None) if scale is None else (of_scale, of_shift)),
        None,
        None,
    )


_gate.register_autograd(_gate_differentiated, setup_context=_save_gate)


def _body(x: Tensor) -> ModuleType | type[Plain]:
    if not runs_here(x.device):
        return Plain
    from longtake.models import fused_kernels

    return fused_kernels


class Plain:
    """The formulas in PyTorch's operations."""

    @staticmethod
    def join(
        parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], rope: Tensor | None, pairs: bool,
        eps: float,
    ) -> Tensor:  # fmt: skip
        found = []
        for i, x in enumerate(parts):
            z = _wide(x)
            if weights:
                z = _normed(z, eps, bool(biases))[0] * weights[i] + (biases[i] if biases else 0)
            found.append(z)
        out = torch.cat(found, 1)
        return (out if rope is None else turned(out, rope[0], rope[1], pairs)).to(parts[0].dtype)

    @staticmethod
    def join_backward(
        grad: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], weights: Sequence[Tensor],
        biases: Sequence[Tensor], rope: Tensor | None, pairs: bool, eps: float, learned: bool,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
        whole = _wide(grad) if rope is None else turned(_wide(grad), rope[0], -rope[1], pairs)
        found: tuple[list[Tensor], ...] = [], [], []
        for i, dz in enumerate(whole.split(lengths, 1)):
            dx, others = dz, tuple(range(dz.dim() - 1))
            if weights:
                n, inverse = _normed(_wide(parts[i]), eps, bool(biases))
                dx = _of_norm(dz * weights[i], n, inverse, bool(biases))
                found[1].extend([(dz * n).sum(others).to(weights[i].dtype)] * learned)
                found[2].extend([dz.sum(others).to(biases[i].dtype)] if learned and biases else [])
            found[0].append(dx.to(grad.dtype, copy=True))
        return found

    @staticmethod
    def gate(
        x: Tensor, y: Tensor | None, gates: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        runs: Sequence[int], eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        added, out = x.new_empty(0), x.new_empty(0)
        if y is not None:
            x = added = (_wide(x) + _of_rows(gates, runs) * y).to(x.dtype)
        if scale is not None:
            n = _normed(_wide(x), eps, True)[0]
            out = (n * _of_rows(scale, runs) + _of_rows(shift, runs)).to(x.dtype)
        return added, out

    @staticmethod
    def gate_backward(
        of_added: Tensor | None, of_out: Tensor | None, x: Tensor | None, y: Tensor | None, gates: Tensor | None,
        scale: Tensor | None, runs: Sequence[int], eps: float, learned: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        like, numbers = of_added if of_out is None else of_out, gates if scale is None else scale
        total, dx, dy = 0.0 if of_added is None else _wide(of_added), like.new_empty(0), like.new_empty(0)
        sums = [numbers.new_zeros(numbers.shape) for _ in range(3)]
        if scale is not None:
            n, inverse = _normed(_wide(x), eps, True)
            dz = _wide(of_out)
            total = total + _of_norm(dz * _of_rows(scale, runs), n, inverse, True)
            dx = total.to(like.dtype)
            sums[1:] = _by_kind(dz * n, runs, len(numbers)), _by_kind(dz, runs, len(numbers))
        if y is not None:
            dy, sums[0] = (total * _of_rows(gates, runs)).to(like.dtype), _by_kind(total * y, runs, len(numbers))
        return dx, dy, torch.stack(sums) if learned else numbers.new_empty(3, 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """n and r of the formulas above."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse, inverse


def _of_norm(dn: Tensor, n: Tensor, inverse: Tensor, centred: bool) -> Tensor:
    mean = dn.mean(-1, keepdim=True) if centred else 0.0
    return inverse * (dn - mean - n * (dn * n).mean(-1, keepdim=True))


def _of_rows(numbers: Tensor, runs: Sequence[int]) -> Tensor:
    """Numbers of kinds [kinds, G, D] for every row [G, R, D]."""
    parts = [numbers[i % len(numbers), :, None].expand(-1, run, -1) for i, run in enumerate(runs)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _by_kind(rows: Tensor, runs: Sequence[int], kinds: int) -> Tensor:
    parts = [part.sum(1) for part in rows.split(list(runs), 1)]
    return torch.stack([sum(parts[i::kinds]) for i in range(kinds)])
