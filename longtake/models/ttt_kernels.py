"""Triton kernels of the scan of a TTT layer and of its gradient; `ttt_triton` says in which order they run.

A network in float32 fills half of a multiprocessor's registers, so a chain keeps it in memory, 132 KiB that stay in the
caches, and takes its hidden units in tiles. A barrier stands between a program's reads and writes of one place.

Factors of products are in q's dtype and sums in float32. Rates are about 1e-5 and gradients of any size, so in float16
a factor is divided by its largest value first.

Of a linear network M is 0, and its one tile of hidden units are the keys. Names and packing are those of `ttt_chunked`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _kernel(function: Any) -> Any:
    return triton.jit(function, do_not_specialize=["first", "steps"])


@triton.jit
def _top(x):
    return tl.max(tl.max(tl.abs(x), 1), 0) + 1e-30


@triton.jit
def _dot(x, y, like):
    """x @ y in float32, of factors in the dtype that `like` points to."""
    factors = like.dtype.element_ty
    if factors == tl.float16:
        x, y = x.to(tl.float32), y.to(tl.float32)
        x_top, y_top = _top(x), _top(y)
        product = tl.dot((x / x_top).to(factors), (y / y_top).to(factors))
        return product * x_top * y_top
    else:
        return tl.dot(x.to(factors), y.to(factors), input_precision="ieee")


@triton.jit
def _first(matrices, tile, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr):
    """Where a tile [K, TILE] of W1 is."""
    return matrices + tile * TILE + tl.arange(0, K)[:, None] * M + tl.arange(0, TILE)[None, :]


@triton.jit
def _last(matrices, tile, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr):
    """Where a tile [TILE, K] of W2 is."""
    return matrices + K * M + tile * TILE * K + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]


@triton.jit
def _units(x, net, net_b, tile, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr):
    """A tile of hidden units [ROWS, TILE], GELU's slope there, and what entered it; of a linear network x itself."""
    if M > 0:
        bias = tl.load(net_b + tile * TILE + tl.arange(0, TILE))[None, :]
        before = _dot(x, tl.load(_first(net, tile, K, M, TILE)), net) + bias
        units, slope = _gelu(before)
        return units, slope, before
    else:
        return x, x, x


@triton.jit
def _run(x, net, net_b, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    z = tl.zeros((ROWS, K), tl.float32) + tl.load(net_b + M + tl.arange(0, K))[None, :]
    for tile in range(TILES):
        units, _, _ = _units(x, net, net_b, tile, K, M, TILE)
        z += _dot(units, tl.load(_last(net, tile, K, M, TILE)), net)
    return z


@triton.jit
def _place(first, step, program, tokens, heads, MINI_BATCH: tl.constexpr, ROWS: tl.constexpr):
    """The index of each token of a mini-batch in [B, S, N], and which of them there are."""
    rows = tl.arange(0, ROWS)
    token = (first + step) * MINI_BATCH + rows
    place = ((program // heads) * tokens + token) * heads + program % heads
    return place, (rows < MINI_BATCH) & (token < tokens)


@triton.jit
def _tokens(base, place, there, K: tl.constexpr):
    """Rows [ROWS, K] of [B, S, N, K] in float32, 0 where there is no token."""
    return tl.load(base + place[:, None] * K + tl.arange(0, K)[None, :], mask=there[:, None], other=0.0).to(tl.float32)


@triton.jit
def _write(base, rows, place, there, K: tl.constexpr):
    tl.store(base + place[:, None] * K + tl.arange(0, K)[None, :], rows.to(base.dtype.element_ty), mask=there[:, None])


@triton.jit
def _norm_of(gamma, beta, head, K: tl.constexpr):
    """The norm's weight and bias of a head [1, K]."""
    columns = tl.arange(0, K)
    return tl.load(gamma + head * K + columns)[None, :], tl.load(beta + head * K + columns)[None, :]


@triton.jit
def _normed(z, eps, K: tl.constexpr):
    """z less its mean over its deviation, and 1 / deviation [ROWS, 1]."""
    centred = z - (tl.sum(z, 1) / K)[:, None]
    inverse = (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps))[:, None]
    return centred * inverse, inverse


@triton.jit
def _through_norm(grad, zhat, inverse, K: tl.constexpr):
    """The gradient before the norm from the one after it."""
    return (grad - (tl.sum(grad, 1) / K)[:, None] - zhat * (tl.sum(grad * zhat, 1) / K)[:, None]) * inverse


@triton.jit
def _through_loss(d_u, u, zhat, inverse, weight, bias, goal, K: tl.constexpr):
    """From the gradient of u, itself the gradient of the inner loss: that of what entered u's norm, and that of z."""
    residual = weight * zhat + bias - goal
    x = weight * residual
    d_norm = _through_norm(d_u, zhat, inverse, K)
    d_zhat = weight * weight * d_norm - inverse / K * (
        x * tl.sum(d_u * zhat, 1)[:, None] + d_u * tl.sum(x * zhat, 1)[:, None]
    )
    d_z = _through_norm(d_zhat, zhat, inverse, K) - inverse / K * zhat * tl.sum(d_u * u, 1)[:, None]
    return d_norm, d_z, residual


@triton.jit
def _gelu(x):
    """The tanh form of GELU and its first derivative."""
    t = 2.0 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1.0
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@triton.jit
def _gelu_curve(x):
    """The second derivative."""
    t = 2.0 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1.0
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return (1.0 - t * t) * (inner - x * t * inner * inner + 0.10703222440890037 * x * x)


@_kernel
def learn(
    k, target, rate, gamma, beta, running, nets, biases, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Carries the matrices of `running` [B, N, P] on through a segment and leaves the networks before and after each
    mini-batch in `nets` [steps + 1, X, matrices] and `biases` [steps + 1, X, M + K], whose first rows are there."""
    program = tl.program_id(0).to(tl.int64)
    matrices: tl.constexpr = K * M + TILES * TILE * K
    weight, bias = _norm_of(gamma, beta, program % heads, K)
    running += program * (matrices + M + K)
    for step in range(steps):
        row = step * tl.num_programs(0) + program
        net, net_b = nets + row * matrices, biases + row * (M + K)
        row += tl.num_programs(0)
        after, after_b = nets + row * matrices, biases + row * (M + K)
        place, there = _place(first, step, program, tokens, heads, MINI_BATCH, ROWS)
        key = _tokens(k, place, there, K)
        goal = _tokens(target, place, there, K)
        e = tl.load(rate + place, mask=there, other=0.0)[:, None]
        zhat, inverse = _normed(_run(key, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
        v = e * _through_norm(weight * (weight * zhat + bias - goal), zhat, inverse, K)
        for tile in range(TILES):
            units, slope, _ = _units(key, net, net_b, tile, K, M, TILE)
            w2 = tl.load(_last(running, tile, K, M, TILE)) - _dot(tl.trans(units), v, nets)
            if M > 0:
                v1 = _dot(v, tl.trans(tl.load(_last(net, tile, K, M, TILE))), nets) * slope
                w1 = tl.load(_first(running, tile, K, M, TILE)) - _dot(tl.trans(key), v1, nets)
                columns = tile * TILE + tl.arange(0, TILE)
                tl.store(after_b + columns, tl.load(net_b + columns) - tl.sum(v1, 0))
            tl.debug_barrier()
            tl.store(_last(running, tile, K, M, TILE), w2)
            tl.store(_last(after, tile, K, M, TILE), w2.to(nets.dtype.element_ty))
            if M > 0:
                tl.store(_first(running, tile, K, M, TILE), w1)
                tl.store(_first(after, tile, K, M, TILE), w1.to(nets.dtype.element_ty))
        columns = M + tl.arange(0, K)
        tl.store(after_b + columns, tl.load(net_b + columns) - tl.sum(v, 0))
        tl.debug_barrier()


@_kernel
def read(
    q, gamma, beta, nets, biases, out, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """What queries read from the networks after their mini-batch."""
    program, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = (step + 1) * tl.num_programs(0) + program
    place, there = _place(first, step, program, tokens, heads, MINI_BATCH, ROWS)
    query = _tokens(q, place, there, K)
    net, net_b = nets + row * (K * M + TILES * TILE * K), biases + row * (M + K)
    zhat, _ = _normed(_run(query, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
    weight, bias = _norm_of(gamma, beta, program % heads, K)
    _write(out, query + weight * zhat + bias, place, there, K)


@_kernel
def read_backward(
    grad, q, gamma, beta, nets, biases, grad_q, of_nets, of_read, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of the network that they read, packed in `of_nets` [steps, X, P], and of the norm's weight
    and bias in `of_read` [steps, X, 2, K]."""
    program, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    matrices: tl.constexpr = K * M + TILES * TILE * K
    row = (step + 1) * tl.num_programs(0) + program
    net, net_b = nets + row * matrices, biases + row * (M + K)
    place, there = _place(first, step, program, tokens, heads, MINI_BATCH, ROWS)
    query = _tokens(q, place, there, K)
    outer = _tokens(grad, place, there, K)
    zhat, inverse = _normed(_run(query, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
    row = step * tl.num_programs(0) + program
    tl.store(of_read + row * 2 * K + tl.arange(0, K), tl.sum(outer * zhat, 0))
    tl.store(of_read + row * 2 * K + K + tl.arange(0, K), tl.sum(outer, 0))
    weight, _bias = _norm_of(gamma, beta, program % heads, K)
    d_z = _through_norm(weight * outer, zhat, inverse, K)
    of_nets += row * (matrices + M + K)
    d_query = outer
    for tile in range(TILES):
        units, slope, _ = _units(query, net, net_b, tile, K, M, TILE)
        d_units = _dot(d_z, tl.trans(tl.load(_last(net, tile, K, M, TILE))), nets)
        tl.store(_last(of_nets, tile, K, M, TILE), _dot(tl.trans(units), d_z, nets))
        if M > 0:
            d_units *= slope
            tl.store(_first(of_nets, tile, K, M, TILE), _dot(tl.trans(query), d_units, nets))
            tl.store(of_nets + matrices + tile * TILE + tl.arange(0, TILE), tl.sum(d_units, 0))
            d_units = _dot(d_units, tl.trans(tl.load(_first(net, tile, K, M, TILE))), nets)
        d_query += d_units
    tl.store(of_nets + matrices + M + tl.arange(0, K), tl.sum(d_z, 0))
    _write(grad_q, d_query, place, there, K)


@_kernel
def learn_backward(
    k, target, rate, gamma, beta, nets, biases, of_nets, later, of_norm, grad_k, grad_target, grad_rate,
    first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of networks, `later` [B, N, P], back through a segment; `of_norm` [B, N, 2, K] is added to.

    `later` has what the last queries say in it. The names are those of `ttt_chunked._learn_backward`.
    """
    program = tl.program_id(0).to(tl.int64)
    matrices: tl.constexpr = K * M + TILES * TILE * K
    weight, bias = _norm_of(gamma, beta, program % heads, K)
    d_weight, d_bias = _norm_of(of_norm, of_norm + K, 2 * program, K)
    later += program * (matrices + M + K)
    for back in range(steps):
        step = steps - 1 - back
        row = step * tl.num_programs(0) + program
        net, net_b = nets + row * matrices, biases + row * (M + K)
        place, there = _place(first, step, program, tokens, heads, MINI_BATCH, ROWS)
        key = _tokens(k, place, there, K)
        goal = _tokens(target, place, there, K)
        e = tl.load(rate + place, mask=there, other=0.0)[:, None]
        zhat, inverse = _normed(_run(key, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
        u = _through_norm(weight * (weight * zhat + bias - goal), zhat, inverse, K)
        d_v = _through_updates(key, net, net_b, later, ROWS, K, M, TILE, TILES)
        tl.store(grad_rate + place, tl.sum(d_v * u, 1), mask=there)
        d_norm, d_z, residual = _through_loss(e * d_v, u, zhat, inverse, weight, bias, goal, K)
        d_bias += tl.sum(weight * d_norm, 0)[None, :]
        d_weight += tl.sum(d_norm * (residual + weight * zhat), 0)[None, :]
        _write(grad_target, -weight * d_norm, place, there, K)
        tl.debug_barrier()
        more = tl.minimum(step, 1)
        said = of_nets + (row - more * tl.num_programs(0)) * (matrices + M + K)  # to the mini-batch before
        d_key = _through_net(key, e * u, d_z, net, net_b, later, said, more, ROWS, K, M, TILE, TILES)
        _write(grad_k, d_key, place, there, K)
        tl.debug_barrier()
    tl.store(of_norm + program * 2 * K + tl.arange(0, K)[None, :], d_weight)
    tl.store(of_norm + program * 2 * K + K + tl.arange(0, K)[None, :], d_bias)


@triton.jit
def _through_updates(
    key, net, net_b, later,
    ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of v from that of the network after the updates."""
    later_b = later + K * M + TILES * TILE * K
    d_v = tl.zeros((ROWS, K), tl.float32) - tl.load(later_b + M + tl.arange(0, K))[None, :]
    for tile in range(TILES):
        units, slope, _ = _units(key, net, net_b, tile, K, M, TILE)
        d_v -= _dot(units, tl.load(_last(later, tile, K, M, TILE)), net)
        if M > 0:
            d_b1 = tl.load(later_b + tile * TILE + tl.arange(0, TILE))[None, :]
            d_v1 = _dot(key, tl.load(_first(later, tile, K, M, TILE)), net) + d_b1
            d_v -= _dot(d_v1 * slope, tl.load(_last(net, tile, K, M, TILE)), net)
    return d_v


@triton.jit
def _through_net(
    key, v, d_z, net, net_b, later, said, more,
    ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and, in place, of the network before the updates, to which what is `said` of
    it is added `more` times, 0 or 1."""
    later_b, said_b = later + K * M + TILES * TILE * K, said + K * M + TILES * TILE * K
    d_key = tl.zeros((ROWS, K), tl.float32)
    for tile in range(TILES):
        units, slope, before = _units(key, net, net_b, tile, K, M, TILE)
        w2 = tl.load(_last(net, tile, K, M, TILE))
        d_w2 = tl.load(_last(later, tile, K, M, TILE))
        d_units = _dot(d_z, tl.trans(w2), net) - _dot(v, tl.trans(d_w2), net)
        d_w2 += _dot(tl.trans(units), d_z, net) + more * tl.load(_last(said, tile, K, M, TILE))
        if M > 0:
            columns = tile * TILE + tl.arange(0, TILE)
            d_w1, d_b1 = tl.load(_first(later, tile, K, M, TILE)), tl.load(later_b + columns)
            d_v1 = _dot(key, d_w1, net) + d_b1[None, :]
            v_back = _dot(v, tl.trans(w2), net)
            d_w2 -= _dot(tl.trans(d_v1 * slope), v, net)
            d_units = d_units * slope - d_v1 * v_back * _gelu_curve(before)
            d_key -= _dot(v_back * slope, tl.trans(d_w1), net)
            d_key += _dot(d_units, tl.trans(tl.load(_first(net, tile, K, M, TILE))), net)
            d_w1 += _dot(tl.trans(key), d_units, net)
            d_w1 += more * tl.load(_first(said, tile, K, M, TILE))
            d_b1 += tl.sum(d_units, 0) + more * tl.load(said_b + columns)
        else:
            d_key += d_units
        tl.debug_barrier()
        tl.store(_last(later, tile, K, M, TILE), d_w2)
        if M > 0:
            tl.store(_first(later, tile, K, M, TILE), d_w1)
            tl.store(later_b + columns, d_b1)
    columns = M + tl.arange(0, K)
    d_b2 = tl.load(later_b + columns) + tl.sum(d_z, 0) + more * tl.load(said_b + columns)
    tl.debug_barrier()
    tl.store(later_b + columns, d_b2)
    return d_key
