"""Triton kernels of the scan of a TTT layer and of its gradient; `ttt_triton` says in which order they run.

A network in float32 fills half of a multiprocessor's registers, so a chain keeps it in memory, 132 KiB that stay in the
caches, and takes its hidden units in tiles. A barrier separates a program's reads of an address from its writes.
`benchmarks/kernel_registers.py` lists registers and stack of each kernel.

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
    """Return x @ y in float32, of factors in the dtype that `like` points to."""
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
    """Return pointers to a tile [K, TILE] of W1."""
    return matrices + tile * TILE + tl.arange(0, K)[:, None] * M + tl.arange(0, TILE)[None, :]


@triton.jit
def _last(matrices, tile, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr):
    """Return pointers to a tile [TILE, K] of W2."""
    return matrices + K * M + tile * TILE * K + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]


@triton.jit
def _units(x, net, net_b, tile, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr):
    """Compute a tile of hidden units [ROWS, TILE], GELU's slope there, and its input; of a linear network x itself."""
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
def _mini_batch(first, step, program, tokens, heads, MINI_BATCH: tl.constexpr, ROWS: tl.constexpr):
    """Index in [B, S, N] of a mini-batch's first token, those of its tokens from there on, and which of them exist."""
    rows = tl.arange(0, ROWS)
    token = (first + step) * MINI_BATCH
    start = ((program // heads) * tokens + token) * heads + program % heads
    return start, rows * heads, (rows < MINI_BATCH) & (rows < tokens - token)


@triton.jit
def _tokens(base, start, rows, exists, K: tl.constexpr):
    """Rows [ROWS, K] of [B, S, N, K] in float32, 0 where there is no token."""
    at = base + start * K + rows[:, None] * K + tl.arange(0, K)[None, :]
    return tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32)


@triton.jit
def _write(base, x, start, rows, exists, K: tl.constexpr):
    at = base + start * K + rows[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _norm_of(gamma, beta, head, K: tl.constexpr):
    """Load the norm's weight and bias of a head [1, K]."""
    columns = tl.arange(0, K)
    return tl.load(gamma + head * K + columns)[None, :], tl.load(beta + head * K + columns)[None, :]


@triton.jit
def _normed(z, eps, K: tl.constexpr):
    """Return z minus its mean over its standard deviation, and 1 / deviation [ROWS, 1]."""
    centred = z - (tl.sum(z, 1) / K)[:, None]
    inverse = (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps))[:, None]
    return centred * inverse, inverse


@triton.jit
def _through_norm(grad, zhat, inverse, K: tl.constexpr):
    """Return the gradient before the norm from the one after it."""
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
    """Return the tanh form of GELU and its first derivative."""
    t = 2.0 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1.0
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@triton.jit
def _gelu_curve(x):
    """Return the second derivative of the tanh form of GELU."""
    t = 2.0 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1.0
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return (1.0 - t * t) * (inner - x * t * inner * inner + 0.10703222440890037 * x * x)


@_kernel
def learn(
    k, target, rate, gamma, beta, running, nets, biases, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Carry the matrices of `running` [B, N, P] through a segment and store the networks before and after each
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
        start, rows, exists = _mini_batch(first, step, program, tokens, heads, MINI_BATCH, ROWS)
        key = _tokens(k, start, rows, exists, K)
        goal = _tokens(target, start, rows, exists, K)
        e = tl.load(rate + start + rows, mask=exists, other=0.0)[:, None]
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
    """Compute the outputs of queries by the networks after their mini-batch."""
    program, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = (step + 1) * tl.num_programs(0) + program
    start, rows, exists = _mini_batch(first, step, program, tokens, heads, MINI_BATCH, ROWS)
    query = _tokens(q, start, rows, exists, K)
    net, net_b = nets + row * (K * M + TILES * TILE * K), biases + row * (M + K)
    zhat, _ = _normed(_run(query, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
    weight, bias = _norm_of(gamma, beta, program % heads, K)
    _write(out, query + weight * zhat + bias, start, rows, exists, K)


@_kernel
def read_backward(
    grad, q, gamma, beta, nets, biases, grad_q, net_grads, norm_grads, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of the networks that they read, packed in rows 1 to `steps` of `net_grads`
    [steps + 1, X, P], and of the norm's weight and bias in `norm_grads` [steps, X, 2, K]."""
    program, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    matrices: tl.constexpr = K * M + TILES * TILE * K
    row = (step + 1) * tl.num_programs(0) + program
    net, net_b = nets + row * matrices, biases + row * (M + K)
    start, rows, exists = _mini_batch(first, step, program, tokens, heads, MINI_BATCH, ROWS)
    query = _tokens(q, start, rows, exists, K)
    outer = _tokens(grad, start, rows, exists, K)
    zhat, inverse = _normed(_run(query, net, net_b, ROWS, K, M, TILE, TILES), eps, K)
    norm = norm_grads + (step * tl.num_programs(0) + program) * 2 * K + tl.arange(0, K)
    tl.store(norm, tl.sum(outer * zhat, 0))
    tl.store(norm + K, tl.sum(outer, 0))
    weight, _bias = _norm_of(gamma, beta, program % heads, K)
    d_z = _through_norm(weight * outer, zhat, inverse, K)
    net_grads += row * (matrices + M + K)
    d_query = outer
    for tile in range(TILES):
        units, slope, _ = _units(query, net, net_b, tile, K, M, TILE)
        d_units = _dot(d_z, tl.trans(tl.load(_last(net, tile, K, M, TILE))), nets)
        tl.store(_last(net_grads, tile, K, M, TILE), _dot(tl.trans(units), d_z, nets))
        if M > 0:
            d_units *= slope
            tl.store(_first(net_grads, tile, K, M, TILE), _dot(tl.trans(query), d_units, nets))
            tl.store(net_grads + matrices + tile * TILE + tl.arange(0, TILE), tl.sum(d_units, 0))
            d_units = _dot(d_units, tl.trans(tl.load(_first(net, tile, K, M, TILE))), nets)
        d_query += d_units
    tl.store(net_grads + matrices + M + tl.arange(0, K), tl.sum(d_z, 0))
    _write(grad_q, d_query, start, rows, exists, K)


@triton.jit
def _load_rows(base, row, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Load a tile [ROWS, TILE] of a mini-batch's rows in a tensor [..., ROWS, WIDTH], in float32."""
    return tl.load(_rows(base, row, tile, ROWS, WIDTH, TILE)).to(tl.float32)


@triton.jit
def _store_rows(base, x, row, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    tl.store(_rows(base, row, tile, ROWS, WIDTH, TILE), x.to(base.dtype.element_ty))


@triton.jit
def _rows(base, row, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    base += row * (ROWS * WIDTH) + tile * TILE
    return base + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, TILE)[None, :]


@_kernel
def prepare_backward(
    k, target, rate, gamma, beta, nets, biases, z, v, units, slope, bend, v1, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Compute what `learn_backward` needs and no gradient of a network changes: z and v [steps, X, ROWS, K], and of an
    MLP the hidden units, GELU's slope, `bend` (its second derivative times v @ W2.T) and v1 [steps, X, ROWS, M]."""
    program, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = step * tl.num_programs(0) + program
    net, net_b = nets + row * (K * M + TILES * TILE * K), biases + row * (M + K)
    weight, bias = _norm_of(gamma, beta, program % heads, K)
    start, rows, exists = _mini_batch(first, step, program, tokens, heads, MINI_BATCH, ROWS)
    key = _tokens(k, start, rows, exists, K)
    goal = _tokens(target, start, rows, exists, K)
    e = tl.load(rate + start + rows, mask=exists, other=0.0)[:, None]
    result = _run(key, net, net_b, ROWS, K, M, TILE, TILES)
    zhat, inverse = _normed(result, eps, K)
    scaled = e * _through_norm(weight * (weight * zhat + bias - goal), zhat, inverse, K)
    _store_rows(z, result, row, 0, ROWS, K, K)
    _store_rows(v, scaled, row, 0, ROWS, K, K)
    if M > 0:
        for tile in range(TILES):
            after, derivative, before = _units(key, net, net_b, tile, K, M, TILE)
            back = _dot(scaled, tl.trans(tl.load(_last(net, tile, K, M, TILE))), net)
            _store_rows(units, after, row, tile, ROWS, M, TILE)
            _store_rows(slope, derivative, row, tile, ROWS, M, TILE)
            _store_rows(bend, back * _gelu_curve(before), row, tile, ROWS, M, TILE)
            _store_rows(v1, back * derivative, row, tile, ROWS, M, TILE)


# Each part of `learn_backward` loads its factors: where the result of a dot is a factor of the next one, Triton has
# both halves of 8 warps compute the same rows, in twice the registers. One kernel that held them and computed hidden
# units three times had 16 matmuls per tile and 1,184 bytes of stack (Triton 3.6). Now there are 10, and 4 in
# `prepare_backward`, which writes 152 KiB per mini-batch and head for this one to read: each way 2.2 us per mini-batch
# at 48 heads and 3.35 TB/s. Not timed on a GPU.
@_kernel
def learn_backward(
    k, target, rate, gamma, beta, nets, z, v, units, slope, bend, v1, net_grads, later, norm_grads,
    grad_k, grad_target, grad_rate, d_v, d_z, d_v1, d_back, d_before, first, steps, tokens, heads, eps,
    MINI_BATCH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Carry the gradient of networks, `later` [B, N, P], back through a segment, in place; add the gradients that
    queries gave each network, `net_grads`, on the way, and those of the norm to `norm_grads` [steps, X, 2, K].

    Names are those of `ttt_chunked._learn_backward`; a gradient is `d_name` in memory and `name_grad` in registers.
    """
    program = tl.program_id(0).to(tl.int64)
    matrices: tl.constexpr = K * M + TILES * TILE * K
    later += program * (matrices + M + K)
    for back in range(steps):
        step = steps - 1 - back
        row = step * tl.num_programs(0) + program
        net, query_grads = nets + row * matrices, net_grads + row * (matrices + M + K)
        start, rows, exists = _mini_batch(first, step, program, tokens, heads, MINI_BATCH, ROWS)
        key = _tokens(k, start, rows, exists, K)

        # through the updates
        _through_updates(key, net, units, slope, later, d_v, d_v1, d_back, row, program, ROWS, K, M, TILE, TILES)
        tl.debug_barrier()

        # through the inner loss: d_z
        goal = _tokens(target, start, rows, exists, K)
        e = tl.load(rate + start + rows, mask=exists, other=0.0)[:, None]
        weight, bias = _norm_of(gamma, beta, program % heads, K)
        zhat, inverse = _normed(_load_rows(z, row, 0, ROWS, K, K), eps, K)
        u = _through_norm(weight * (weight * zhat + bias - goal), zhat, inverse, K)
        v_grad = _load_rows(d_v, program, 0, ROWS, K, K)
        d_norm, z_grad, residual = _through_loss(e * v_grad, u, zhat, inverse, weight, bias, goal, K)
        _store_rows(d_z, z_grad, program, 0, ROWS, K, K)
        tl.store(grad_rate + start + rows, tl.sum(v_grad * u, 1), mask=exists)
        _write(grad_target, -weight * d_norm, start, rows, exists, K)
        columns = tl.arange(0, K)
        norm, later_b2 = norm_grads + row * 2 * K + columns, later + matrices + M + columns
        weight_grad = tl.load(norm) + tl.sum(d_norm * (residual + weight * zhat), 0)
        bias_grad = tl.load(norm + K) + tl.sum(weight * d_norm, 0)
        d_b2 = tl.load(later_b2) + tl.sum(z_grad, 0) + tl.load(query_grads + matrices + M + columns)
        tl.debug_barrier()
        tl.store(norm, weight_grad)
        tl.store(norm + K, bias_grad)
        tl.store(later_b2, d_b2)

        # through the network before the updates
        z_grad, v_step = _load_rows(d_z, program, 0, ROWS, K, K), _load_rows(v, row, 0, ROWS, K, K)
        if M > 0:
            _through_last(
                z_grad, v_step, net, units, slope, bend, later, query_grads, d_v1, d_back, d_before, row, program,
                ROWS, K, M, TILE, TILES,
            )  # fmt: skip
            tl.debug_barrier()
            key = _tokens(k, start, rows, exists, K)  # loaded again: fewer registers are live in between
            d_key = _through_first(key, net, v1, later, query_grads, d_before, row, program, ROWS, K, M, TILE, TILES)
        else:
            d_key = _through_linear(key, z_grad, v_step, net, later, query_grads, K)
        _write(grad_k, d_key, start, rows, exists, K)
        tl.debug_barrier()


@triton.jit
def _through_updates(
    key, net, units, slope, later, d_v, d_v1, d_back, row, program,
    ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """d_v, d_v1 and d_back from the gradient of the network after the updates W -= units.T @ v."""
    later_b = later + K * M + TILES * TILE * K
    if M > 0:
        for tile in range(TILES):
            d_b1 = tl.load(later_b + tile * TILE + tl.arange(0, TILE))[None, :]
            v1_grad = _dot(key, tl.load(_first(later, tile, K, M, TILE)), net) + d_b1
            back_grad = v1_grad * _load_rows(slope, row, tile, ROWS, M, TILE)
            _store_rows(d_v1, v1_grad, program, tile, ROWS, M, TILE)
            _store_rows(d_back, back_grad, program, tile, ROWS, M, TILE)
        tl.debug_barrier()
    v_grad = tl.zeros((ROWS, K), tl.float32) - tl.load(later_b + M + tl.arange(0, K))[None, :]
    for tile in range(TILES):
        d_w2 = tl.load(_last(later, tile, K, M, TILE))
        if M > 0:
            v_grad -= _dot(_load_rows(units, row, tile, ROWS, M, TILE), d_w2, net)
            w2 = tl.load(_last(net, tile, K, M, TILE))
            v_grad -= _dot(_load_rows(d_back, program, tile, ROWS, M, TILE), w2, net)
        else:
            v_grad -= _dot(key, d_w2, net)
    _store_rows(d_v, v_grad, program, 0, ROWS, K, K)


@triton.jit
def _through_linear(key, z_grad, v_step, net, later, query_grads, K: tl.constexpr):
    """Return the gradient of keys and update, in place, that of W before the updates."""
    d_w = tl.load(_last(later, 0, K, 0, K))
    d_key = _dot(z_grad, tl.trans(tl.load(_last(net, 0, K, 0, K))), net) - _dot(v_step, tl.trans(d_w), net)
    d_w += _dot(tl.trans(key), z_grad, net) + tl.load(_last(query_grads, 0, K, 0, K))
    tl.debug_barrier()
    tl.store(_last(later, 0, K, 0, K), d_w)
    return d_key


@triton.jit
def _through_last(
    z_grad, v_step, net, units, slope, bend, later, query_grads, d_v1, d_back, d_before, row, program,
    ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update the gradients, in place, of W2 and b1 before the updates, and store that of GELU's input."""
    for tile in range(TILES):
        d_w2 = tl.load(_last(later, tile, K, M, TILE))
        d_units = _dot(z_grad, tl.trans(tl.load(_last(net, tile, K, M, TILE))), net)
        d_units -= _dot(v_step, tl.trans(d_w2), net)
        before_grad = d_units * _load_rows(slope, row, tile, ROWS, M, TILE)
        before_grad -= _load_rows(d_v1, program, tile, ROWS, M, TILE) * _load_rows(bend, row, tile, ROWS, M, TILE)
        _store_rows(d_before, before_grad, program, tile, ROWS, M, TILE)
        d_w2 += _dot(tl.trans(_load_rows(units, row, tile, ROWS, M, TILE)), z_grad, net)
        d_w2 -= _dot(tl.trans(_load_rows(d_back, program, tile, ROWS, M, TILE)), v_step, net)
        d_w2 += tl.load(_last(query_grads, tile, K, M, TILE))
        columns = K * M + TILES * TILE * K + tile * TILE + tl.arange(0, TILE)
        d_b1 = tl.load(later + columns) + tl.sum(before_grad, 0) + tl.load(query_grads + columns)
        tl.debug_barrier()
        tl.store(_last(later, tile, K, M, TILE), d_w2)
        tl.store(later + columns, d_b1)


@triton.jit
def _through_first(
    key, net, v1, later, query_grads, d_before, row, program,
    ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the gradient of keys and update, in place, that of W1 before the updates."""
    d_key = tl.zeros((ROWS, K), tl.float32)
    for tile in range(TILES):
        d_w1 = tl.load(_first(later, tile, K, M, TILE))
        d_key -= _dot(_load_rows(v1, row, tile, ROWS, M, TILE), tl.trans(d_w1), net)
        before_grad = _load_rows(d_before, program, tile, ROWS, M, TILE)
        d_key += _dot(before_grad, tl.trans(tl.load(_first(net, tile, K, M, TILE))), net)
        d_w1 += _dot(tl.trans(key), before_grad, net) + tl.load(_first(query_grads, tile, K, M, TILE))
        tl.debug_barrier()
        tl.store(_first(later, tile, K, M, TILE), d_w1)
    return d_key
