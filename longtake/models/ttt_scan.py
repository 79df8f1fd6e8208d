"""The scan of a TTT layer: an inner network whose weights learn while they run along the sequence (arXiv 2407.04620).

Each head carries a small network, linear or an MLP, along S tokens. A mini-batch of tokens first updates the network
by one step of gradient descent on 1/2 |LN(net(k)) - target|^2, each token with its own rate; then its tokens read the
updated network: out = q + LN(net'(q)). Mini-batches depend on each other, tokens of one do not.

The formulas stand in `oracle`, which autograd differentiates; so does it run where each query has rates of its own.
What runs else is one operator with a gradient derived by hand, in two bodies: batched products of PyTorch
(`ttt_chunked`) and Triton's kernels (`ttt_triton`).

Shapes: B samples, S tokens, N heads, K head width, b tokens of a mini-batch, C mini-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longtake.models import ttt_chunked
from longtake.models.scratch import SCRATCH

Body = Literal["auto", "oracle", "chunked", "triton"]
Learned = tuple[tuple[Tensor, Tensor], ...]  # of each layer, tokens that it sees and gradients behind it

_LINEAR = 2  # tensors of its state
_FP32 = 4


def ttt_scan(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state: tuple[Tensor, ...],
    mini_batch: int,
    *,
    eps: float = 1e-8,
    body: Body = "auto",
) -> Tensor:
    """Run the inner network along the tokens; return [B, S, N, K] in q's dtype.

    q, k, target: [B, S, N, K]; `target` is what LN(net(k)) is to become, the value less the key. rate: [B, S, N], the
    inner learning rate of a token, already divided by K and by the mini-batch; or [B, S, N, b], the rate by which the
    query at each place reads each token of its mini-batch, of which the last row is learned by. norm_weight, norm_bias:
    [N, K], of the LayerNorm. state: where the network of each head begins, W [N, K, K] and b [N, 1, K], or of an MLP of
    hidden width M, W1 [N, K, M], b1 [N, 1, M], W2 [N, M, K], b2 [N, 1, K]. S need not be a multiple of `mini_batch`:
    tokens that fill the last one have rate 0. The network is held in float32, in float64 for inputs of float64.

    `body`: "auto" takes the Triton kernels on CUDA in half precision where a mini-batch fits one program, else batched
    products. Every sample and head is a program of its own: directions stacked along B run in the same launch.
    """
    if body == "oracle" or rate.dim() == q.dim():
        return oracle(q, k, target, rate, norm_weight, norm_bias, state, mini_batch, eps)[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    hidden = 0 if len(state) == _LINEAR else state[0].shape[-1]
    packed = ttt_chunked.pack(tuple(part.to(dtype) for part in state))
    segment = segment_length(q.shape[1], q.shape[-1], hidden, mini_batch)
    inputs = (q, k, target, rate.to(dtype), norm_weight.to(dtype), norm_bias.to(dtype), packed)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if body == "auto":
        body = "triton" if _kernels_fit(q, hidden, mini_batch) else "chunked"
    return _scan(*inputs, hidden, mini_batch, segment, keep, eps, body)[0]


def _kernels_fit(q: Tensor, hidden: int, mini_batch: int) -> bool:
    return q.is_cuda and _sizes_fit(q, hidden, mini_batch)


def _sizes_fit(q: Tensor, hidden: int, mini_batch: int) -> bool:
    """Kernels' blocks are powers of 2, and of what they can hold float32 factors would take too much."""
    sizes = (q.shape[-1], hidden or q.shape[-1])
    powers = all(16 <= size <= most and size & (size - 1) == 0 for size, most in zip(sizes, (128, 512), strict=True))
    return q.dtype in (torch.bfloat16, torch.float16) and powers and mini_batch <= 128


def segment_length(tokens: int, width: int, hidden: int, mini_batch: int) -> int:
    """Mini-batches between two networks that are kept for backward.

    The root of their number needs the least memory: so many are kept, and so many made again at a time. Each one is
    kept where it is no larger than what one of its mini-batches returns.
    """
    if 2 * max(hidden, width) <= mini_batch:
        return 1
    return math.ceil(math.sqrt(math.ceil(tokens / mini_batch)))


@torch.library.custom_op("longtake::ttt_scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, state: Tensor, hidden: int,
    mini_batch: int, segment: int, keep: bool, eps: float, body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and the packed networks before each segment [segments, B, N, P] where backward will
    want them."""
    return _body(body).forward(q, k, target, rate, gamma, beta, state, hidden, mini_batch, segment, keep, eps)


@torch.library.custom_op("longtake::ttt_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor, q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, kept: Tensor,
    hidden: int, mini_batch: int, segment: int, eps: float, body: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, target, rate, gamma, beta and the packed state."""
    return _body(body).backward(grad, q, k, target, rate, gamma, beta, kept, hidden, mini_batch, segment, eps)


@_scan.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    state, mini_batch, segment, keep = rest[5], *rest[7:10]
    mini_batches = (q.shape[1] + mini_batch - 1) // mini_batch
    segments = (mini_batches + segment - 1) // segment if keep else 0
    return q.new_empty(q.shape), state.new_empty(segments, q.shape[0], *state.shape)


@_scan_backward.register_fake
def _(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, kept = rest[:7]
    return (*(tensor.new_empty(tensor.shape) for tensor in inputs), kept.new_empty(kept.shape[2:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # or backward would be handed zeros for the networks that are kept
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.hidden, ctx.mini_batch, ctx.segment, _, ctx.eps, ctx.body = inputs[7:]


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nobody asks
        return (None,) * 13
    grads = _scan_backward(grad, *ctx.saved_tensors, ctx.hidden, ctx.mini_batch, ctx.segment, ctx.eps, ctx.body)
    return (*grads, *[None] * 6)


_scan.register_autograd(_differentiate, setup_context=_save)


def _forward_scratch(q: Tensor, *rest: Any) -> int:
    """Bytes that `ttt_triton.forward` allocates next to its results: networks before each mini-batch of a segment."""
    state, hidden, mini_batch, segment = rest[5:9]
    if not _sizes_fit(q, hidden, mini_batch):
        return 0
    networks = q.shape[0] * state.shape[0]
    return networks * (_copies_bytes(q, state, hidden, mini_batch, segment) + state[0].nbytes)


def _backward_scratch(grad: Tensor, q: Tensor, *rest: Any) -> int:
    """Bytes that `ttt_triton.backward` allocates next to its results: the same copies, their gradients, and factors of
    each mini-batch of a segment."""
    kept, hidden, mini_batch, segment = rest[5:9]
    if not _sizes_fit(q, hidden, mini_batch):
        return 0
    state, width, size = kept[0, 0], q.shape[-1], q.element_size()
    count, rows = _in_segment(q, mini_batch, segment), max(16, 1 << (mini_batch - 1).bit_length())
    of_norm = 2 * width * _FP32
    gradients = (count + 1) * state[0].nbytes + (count + 1) * of_norm
    factors = rows * (width * (_FP32 + size) + 4 * hidden * size)
    work = rows * (width * (_FP32 + size) + 3 * hidden * size)
    running = 2 * state[0].nbytes  # one carried through the segment, and the gradient of later ones
    copies = _copies_bytes(q, state, hidden, mini_batch, segment)
    return q.shape[0] * state.shape[0] * (copies + gradients + count * factors + work + running)


def _in_segment(q: Tensor, mini_batch: int, segment: int) -> int:
    return min(segment, -(-q.shape[1] // mini_batch))


def _copies_bytes(q: Tensor, state: Tensor, hidden: int, mini_batch: int, segment: int) -> int:
    """Of one head's networks in a segment: matrices in the dtype of `q`, biases in float32."""
    biases = hidden + q.shape[-1]
    matrices = state.shape[-1] - (biases if hidden else q.shape[-1])
    return (_in_segment(q, mini_batch, segment) + 1) * (matrices * q.element_size() + biases * _FP32)


SCRATCH[torch.ops.longtake.ttt_scan.default] = _forward_scratch
SCRATCH[torch.ops.longtake.ttt_scan_backward.default] = _backward_scratch


def scan_flops(batch: int, tokens: int, heads: int, width: int, hidden: int, mini_batch: int) -> int:
    """Floating-point operations of the products of a forward; hidden: 0 for a linear network. Backward has three times
    as many: it makes the networks again, and of each product there are two gradients."""
    filled = -(-tokens // mini_batch) * mini_batch
    return 2 * batch * filled * heads * width * (7 * hidden or 3 * width)


@register_flop_formula(torch.ops.longtake.ttt_scan)
def _flops_forward(q: Sequence[int], *rest: Any, **named: Any) -> int:
    return scan_flops(*q, *rest[6:8])


@register_flop_formula(torch.ops.longtake.ttt_scan_backward)
def _flops_backward(grad: Sequence[int], *rest: Any, **named: Any) -> int:
    return 3 * scan_flops(*grad, *rest[7:9])


def _body(name: str) -> Any:
    """Return the module with `forward` and `backward`; Triton is imported only where its kernels run."""
    if name == "chunked":
        return ttt_chunked
    from longtake.models import ttt_triton

    return ttt_triton


def oracle(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state: tuple[Tensor, ...],
    mini_batch: int,
    eps: float = 1e-8,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the formulas as they are written, differentiated by autograd: the result, and the last state [B,
    N, ...]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    tokens = q.shape[1]
    # [C, B, N, b, K], rates [C, B, N, b, 1]
    is_dense = rate.dim() == q.dim()
    queries, keys, targets, rates = (
        _mini_batches(tensor.to(dtype), mini_batch)
        for tensor in (q, k, target, rate if is_dense else rate.unsqueeze(-1))
    )
    gamma, beta = norm_weight.to(dtype).unsqueeze(1), norm_bias.to(dtype).unsqueeze(1)  # [N, 1, K]
    net = tuple(tensor.to(dtype).expand(q.shape[0], *tensor.shape) for tensor in state)
    outs = []
    for query, key, goal, step in zip(queries, keys, targets, rates, strict=True):
        learned = _learned(net, key, goal, gamma, beta, eps)
        before, net = net, _updated(net, learned, step[..., -1:, :].mT if is_dense else step)
        z = _run(before, query, learned, step) if is_dense else _run(net, query)
        outs.append(query + F.layer_norm(z, query.shape[-1:], eps=eps) * gamma + beta)
    out = torch.stack(outs, 1).transpose(2, 3).flatten(1, 2)[:, :tokens]  # [B, C, N, b, K] -> [B, S, N, K]
    return out.to(q.dtype), net


def _mini_batches(tensor: Tensor, mini_batch: int) -> Tensor:
    """[B, S, N, K] -> [C, B, N, b, K], the last mini-batch filled with zeros."""
    filled = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % mini_batch))
    return filled.unflatten(1, (-1, mini_batch)).permute(1, 0, 3, 2, 4)


def _run(net: tuple[Tensor, ...], x: Tensor, learned: Learned = (), rates: Tensor | None = None) -> Tensor:
    """Return the network at x; with `learned`, each row of x reads it as updated by rates of its own, [...,
    rows, b]."""
    for i, (w, b) in enumerate(zip(net[::2], net[1::2], strict=True)):
        x = F.gelu(x, approximate="tanh") if i else x
        z = x @ w + b
        if learned:
            seen, u = learned[i]
            z = z - (rates * (x @ seen.mT + 1)) @ u
        x = z
    return x


def _learned(net: tuple[Tensor, ...], key: Tensor, goal: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Learned:
    """Return each layer's input for these keys, and the gradient of the loss at its output."""
    if len(net) == _LINEAR:
        w, b = net
        return ((key, _loss_grad(key @ w + b, goal, gamma, beta, eps)),)
    w1, b1, w2, b2 = net
    before = key @ w1 + b1
    hidden = F.gelu(before, approximate="tanh")
    u2 = _loss_grad(hidden @ w2 + b2, goal, gamma, beta, eps)
    return (key, (u2 @ w2.mT) * _gelu_slope(before)), (hidden, u2)


def _updated(net: tuple[Tensor, ...], learned: Learned, rate: Tensor) -> tuple[Tensor, ...]:
    """Return the network after one step by these gradients; rate [..., b, 1]."""
    steps = [(x.mT @ (rate * u), (rate * u).sum(-2, keepdim=True)) for x, u in learned]
    return tuple(part - step for part, step in zip(net, chain.from_iterable(steps), strict=True))


def _loss_grad(z: Tensor, goal: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Gradient of 1/2 |LN(z) - goal|^2 with respect to z."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    zhat = centred * inverse
    x = gamma * (gamma * zhat + beta - goal)
    return (x - x.mean(-1, keepdim=True) - zhat * (x * zhat).mean(-1, keepdim=True)) * inverse


def _gelu_slope(x: Tensor) -> Tensor:
    """Return the derivative of the tanh form of GELU."""
    c0, c1 = 0.7978845608028654, 0.044715
    t = torch.tanh(c0 * (x + c1 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c0 * (1 + 3 * c1 * x * x)
