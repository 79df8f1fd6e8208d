"""The scan of a TTT layer and its gradient in batched matrix products, a segment of mini-batches at a time.

Only what must wait for the mini-batch before it is in the loop over mini-batches: forward the network itself,
backward its gradient. All else of a segment, such as reading the network with the queries, is one batched product.
Forward keeps the network before each segment; backward runs a segment again and sweeps it back.

Shapes: B samples, S tokens, N heads, K head width, M hidden width, b tokens of a mini-batch, g mini-batches of a
segment, X = samples x heads. A network is (W, b) [X, K, K], [X, 1, K], or of an MLP (W1, b1, W2, b2). The last layer
is common to both: of a linear one the hidden units are the keys themselves. Packed, it is one row of P numbers,
the matrices before the biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Net = tuple[Tensor, ...]

_GROUP_NUMBERS = 2**26  # of the hidden units of a segment: heads beyond that wait for the next group
_C0, _C1 = math.sqrt(2 / math.pi), 0.044715  # of GELU's tanh form
_norm = torch.native_layer_norm


@dataclass(frozen=True)
class _Rule:
    """Update rule of the inner networks: the norm's weight and bias [X, 1, K], its eps, and the dtype of factors in
    products."""

    gamma: Tensor
    beta: Tensor
    eps: float
    factors: torch.dtype

    def add(self, base: Tensor, x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        """Return base + alpha * x @ y, in base's dtype."""
        if self.factors != base.dtype:
            return torch.add(base, self.product(x, y), alpha=alpha)
        return torch.baddbmm(base, x, y, alpha=alpha) if x.dim() == 3 else torch.add(base, x @ y, alpha=alpha)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.to(self.factors) @ y.to(self.factors)).to(x.dtype)

    def norm(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z minus its mean over its standard deviation, the mean, and 1 / deviation."""
        return _norm(z, z.shape[-1:], None, None, self.eps)

    def through_norm(self, grad: Tensor, z: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
        """Return the gradient before the norm from the one after it."""
        mask = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(grad, z, z.shape[-1:], mean, inverse, None, None, mask)[0]


def forward(
    q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, state: Tensor, hidden: int,
    mini_batch: int, segment: int, keep: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result [B, S, N, K], and with `keep` the packed networks before each segment [segments, B, N, P].

    state: packed [N, P]; hidden: M, 0 for a linear network; segment: mini-batches of one. Else as `ttt_scan`.
    """
    out = q.new_empty(q.shape)
    starts = range(0, q.shape[1], segment * mini_batch)
    kept = state.new_empty(len(starts) if keep else 0, q.shape[0], *state.shape)
    for heads in _head_groups(q, hidden, mini_batch, segment):
        rule = _rule(q, gamma[heads], beta[heads], eps)
        net = unpack(_each_sample(state[heads], q.shape[0]), q.shape[-1], hidden)
        for number, start in enumerate(starts):
            tokens = slice(start, start + segment * mini_batch)
            queries, keys, targets, rates = (
                _mini_batches(tensor[:, tokens, heads], mini_batch, state.dtype)
                for tensor in (q, k, target, rate.unsqueeze(-1))
            )
            if keep:
                kept[number, :, heads] = pack(net).unflatten(0, (q.shape[0], -1))
            nets = _learn(rule, net, keys, targets, rates)
            zhat = rule.norm(_run(rule, _rows(nets, 1, None), queries)[-1])[0]
            _write(out[:, tokens, heads], torch.addcmul(queries + rule.beta, zhat, rule.gamma))
            net = _rows(nets, -1)
    return out, kept


def backward(
    grad: Tensor, q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, kept: Tensor,
    hidden: int, mini_batch: int, segment: int, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, target, rate, gamma, beta and of the packed state [N, P], from `grad` [B, S, N, K].

    kept: what `forward` kept.
    """
    grads = [tensor.new_empty(tensor.shape) for tensor in (q, k, target, rate)]
    norm_grads = [part.new_empty(part.shape) for part in (gamma, beta)]
    state_grad = torch.empty_like(kept[0, 0])
    for heads in _head_groups(q, hidden, mini_batch, segment):
        rule = _rule(q, gamma[heads], beta[heads], eps)
        later: Net = tuple(map(torch.zeros_like, unpack(kept[0, :, heads].flatten(0, 1), q.shape[-1], hidden)))
        of_norm = torch.zeros(2, *rule.gamma.shape, dtype=gamma.dtype, device=gamma.device)
        for number in reversed(range(len(kept))):
            tokens = slice(number * segment * mini_batch, (number + 1) * segment * mini_batch)
            outer, queries, keys, targets, rates = (
                _mini_batches(tensor[:, tokens, heads], mini_batch, gamma.dtype)
                for tensor in (grad, q, k, target, rate.unsqueeze(-1))
            )
            net = unpack(kept[number, :, heads].flatten(0, 1), q.shape[-1], hidden)
            nets = _learn(rule, net, keys, targets, rates)
            query_grad, of_nets = _read_backward(rule, _rows(nets, 1, None), queries, outer, of_norm)
            token_grads, later = _learn_backward(
                rule, _rows(nets, 0, -1), keys, targets, rates, of_nets, later, of_norm
            )
            for whole, part in zip(grads, (query_grad, *token_grads), strict=True):
                _write(whole[:, tokens, heads] if whole.dim() == 4 else whole[:, tokens, heads, None], part)
        for whole, part in zip(norm_grads, of_norm, strict=True):
            whole[heads] = part.unflatten(0, (q.shape[0], -1)).sum((0, 2))
        state_grad[heads] = pack(later).unflatten(0, (q.shape[0], -1)).sum(0)
    return (*grads, *norm_grads, state_grad)


def _learn(rule: _Rule, net: Net, keys: Tensor, targets: Tensor, rates: Tensor) -> Net:
    """Return the networks [g + 1, X, ...] before each mini-batch [g, X, b, ...] of a segment, and after the last."""
    nets = tuple(part.new_empty(len(keys) + 1, *part.shape) for part in net)
    for whole, part in zip(nets, net, strict=True):
        whole[0] = part
    square, offsets = rule.gamma.square(), rule.gamma * (rule.beta - targets)
    for step, (key, offset, rate) in enumerate(zip(keys, offsets, rates, strict=True)):
        now, after = _rows(nets, step), _rows(nets, step + 1)
        before, units, z = _run(rule, now, key)
        zhat, mean, inverse = rule.norm(z)
        v = rate * rule.through_norm(torch.addcmul(offset, square, zhat), z, mean, inverse)
        after[-2].copy_(rule.add(now[-2], units.mT, v, alpha=-1))
        torch.sub(now[-1], v.sum(-2, keepdim=True), out=after[-1])
        if before is not None:
            v = torch.ops.aten.gelu_backward(rule.product(v, now[-2].mT), before, approximate="tanh")
            after[0].copy_(rule.add(now[0], key.mT, v, alpha=-1))
            torch.sub(now[1], v.sum(-2, keepdim=True), out=after[1])
    return nets


def _run(rule: _Rule, net: Net, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Hidden units before and after GELU, and the result; of a linear network None, x and the result."""
    before, units = None, x
    if len(net) > 2:
        before = rule.add(net[1], x, net[0])
        units = F.gelu(before, approximate="tanh")
    return before, units, rule.add(net[-1], units, net[-2])


def _read_backward(rule: _Rule, nets: Net, queries: Tensor, outer: Tensor, of_norm: Tensor) -> tuple[Tensor, Net]:
    """Gradients of the queries and, mini-batch by mini-batch, of the networks that they read."""
    before, units, z = _run(rule, nets, queries)
    zhat, mean, inverse = rule.norm(z)
    of_norm += torch.stack([(outer * zhat).sum((0, 2)), outer.sum((0, 2))]).unsqueeze(2)
    grad = rule.through_norm(rule.gamma * outer, z, mean, inverse)
    of_nets: Net = (rule.product(units.mT, grad), grad.sum(-2, keepdim=True))
    grad = rule.product(grad, nets[-2].mT)
    if before is not None:
        grad = torch.ops.aten.gelu_backward(grad, before, approximate="tanh")
        of_nets = (rule.product(queries.mT, grad), grad.sum(-2, keepdim=True), *of_nets)
        grad = rule.product(grad, nets[0].mT)
    return outer + grad, of_nets


def _learn_backward(
    rule: _Rule, nets: Net, keys: Tensor, targets: Tensor, rates: Tensor, of_nets: Net, later: Net, of_norm: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Net]:
    """Gradients of keys, targets and rates, and of the network before the segment.

    nets: before each mini-batch [g, X, ...]; of_nets: the gradients that the queries gave the networks after it; later:
    the gradient of the network after the segment, less these. Names: v is the rate times the gradient of the inner
    loss, at the result (v) and before GELU (v1); the outer gradient of `name` is `d_name`.
    """
    width = keys.shape[-1]
    before, units, z = _run(rule, nets, keys)
    zhat, mean, inverse = rule.norm(z)
    residual = torch.addcmul(rule.beta - targets, rule.gamma, zhat)
    x = rule.gamma * residual
    u = rule.through_norm(x, z, mean, inverse)
    v = rates * u
    scaled = x * inverse / width
    share = (x * zhat).sum(-1, keepdim=True) * inverse / width
    lever = zhat * inverse / width
    d_v, d_norm, d_units = torch.empty_like(u), torch.empty_like(u), torch.empty_like(units)
    if before is not None:
        back = rule.product(v, nets[-2].mT)
        slope, curve = _gelu_derivatives(before)
        curve *= back
        v1, firsts = back * slope, torch.empty_like(of_nets[0])
    for step in reversed(range(len(keys))):
        later = tuple(part + more[step] for part, more in zip(later, of_nets, strict=True))
        last = nets[-2][step]
        # d_v and d_units without their sign at first: what the updates subtract
        step_v = rule.add(later[-1], units[step], later[-2])
        if before is not None:
            firsts[step] = later[0]
            d_v1 = rule.add(later[1], keys[step], later[0])
            d_back = d_v1 * slope[step]
            step_v = rule.add(step_v, d_back, last)
        d_v[step] = step_v = step_v.neg_()
        d_u = rates[step] * step_v
        through = rule.through_norm(d_u, z[step], mean[step], inverse[step])
        d_norm[step] = through
        d_zhat = rule.gamma.square() * through
        d_zhat -= scaled[step] * (d_u * zhat[step]).sum(-1, keepdim=True) + share[step] * d_u
        d_z = rule.through_norm(d_zhat, z[step], mean[step], inverse[step])
        d_z -= lever[step] * (d_u * u[step]).sum(-1, keepdim=True)
        step_units = rule.add(rule.product(d_z, last.mT), v[step], later[-2].mT, alpha=-1)
        d_last = rule.add(later[-2], units[step].mT, d_z)
        if before is not None:
            d_last = rule.add(d_last, d_back.mT, v[step], alpha=-1)
            step_units = step_units * slope[step] - d_v1 * curve[step]
            d_first = rule.add(later[0], keys[step].mT, step_units)
            later = (d_first, later[1] + step_units.sum(-2, keepdim=True), *later[2:])
        d_units[step] = step_units
        later = (*later[:-2], d_last, later[-1] + d_z.sum(-2, keepdim=True))
    of_norm[0] += (d_norm * torch.addcmul(residual, rule.gamma, zhat)).sum((0, 2)).unsqueeze(1)
    d_target = -rule.gamma * d_norm
    of_norm[1] -= d_target.sum((0, 2)).unsqueeze(1)
    d_keys = d_units
    if before is not None:
        d_keys = rule.add(rule.product(d_units, nets[0].mT), v1, firsts.mT, alpha=-1)
    return (d_keys, d_target, (d_v * u).sum(-1, keepdim=True)), later


def _gelu_derivatives(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of GELU's tanh form."""
    square = x * x
    t = torch.tanh(_C0 * (x + _C1 * x * square))
    rest, inner = 1 - t * t, _C0 * (1 + 3 * _C1 * square)
    slope = 0.5 * (1 + t) + 0.5 * x * rest * inner
    return slope, rest * (inner - x * t * inner * inner + 3 * _C0 * _C1 * square)


def _rule(q: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> _Rule:
    # a CPU's products are the faster ones in float32, and rates of 1e-5 would be lost in float16
    factors = q.dtype if q.is_cuda and q.dtype == torch.bfloat16 else gamma.dtype
    return _Rule(*(_each_sample(part.unsqueeze(1), q.shape[0]) for part in (gamma, beta)), eps, factors)


def _head_groups(q: Tensor, hidden: int, mini_batch: int, segment: int) -> Iterator[slice]:
    samples, tokens, heads, width = q.shape
    numbers = samples * min(segment * mini_batch, tokens + mini_batch) * max(hidden, width)
    together = max(1, _GROUP_NUMBERS // numbers)
    return (slice(first, first + together) for first in range(0, heads, together))


def _mini_batches(tensor: Tensor, mini_batch: int, dtype: torch.dtype) -> Tensor:
    """[B, S, N, K] -> [g, X, b, K], the last mini-batch filled with zeros."""
    filled = F.pad(tensor.to(dtype), (0, 0, 0, 0, 0, -tensor.shape[1] % mini_batch))
    return filled.unflatten(1, (-1, mini_batch)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _write(to: Tensor, part: Tensor) -> None:
    """[g, X, b, K] into [B, S, N, K], without what filled the last mini-batch."""
    tokens = part.unflatten(1, (to.shape[0], -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    to.copy_(tokens[:, : to.shape[1]])


def _rows(nets: Net, *at: int | None) -> Net:
    index = at[0] if len(at) == 1 else slice(*at)
    return tuple(part[index] for part in nets)


def _each_sample(tensor: Tensor, samples: int) -> Tensor:
    """[N, ...] -> [X, ...]."""
    return tensor.expand(samples, *tensor.shape).flatten(0, 1)


def unpack(packed: Tensor, width: int, hidden: int) -> Net:
    """Rows [..., P] as a network."""
    shapes = [(width, width), (1, width)]
    if hidden:
        shapes = [(width, hidden), (hidden, width), (1, hidden), (1, width)]
    sizes = [rows * columns for rows, columns in shapes]
    parts = [part.unflatten(-1, shape) for part, shape in zip(packed.split(sizes, dim=-1), shapes, strict=True)]
    return tuple(parts[i] for i in ((0, 2, 1, 3) if hidden else (0, 1)))


def pack(net: Net) -> Tensor:
    """[N, ...] -> [N, P]: the matrices, then the biases."""
    return torch.cat([part.flatten(1) for part in (*net[::2], *net[1::2])], dim=1)
