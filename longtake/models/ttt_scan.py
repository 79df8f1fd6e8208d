"""The scan of a TTT layer: an inner network whose weights learn while they run along the sequence (arXiv 2407.04620).

Each head carries a small network, linear or an MLP, along S tokens. A mini-batch of tokens first updates the network
by one step of gradient descent on 1/2 |LN(net(k)) - target|^2, each token with its own rate; then its tokens read the
updated network: out = q + LN(net'(q)). Mini-batches depend on each other, tokens of one do not.

Shapes: B samples, S tokens, N heads, K head width, b tokens of a mini-batch, C mini-batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LINEAR, _MLP = 2, 4  # tensors of a state


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
) -> Tensor:
    """Runs the inner network along the tokens; returns [B, S, N, K] in q's dtype.

    q, k, target: [B, S, N, K]; `target` is what LN(net(k)) is to become, the value less the key. rate: [B, S, N], the
    inner learning rate of a token, already divided by K and by the mini-batch. norm_weight, norm_bias: [N, K], of the
    LayerNorm. state: where the network of each head begins, W [N, K, K] and b [N, 1, K], or of an MLP with the hidden
    width M, W1 [N, K, M], b1 [N, 1, M], W2 [N, M, K], b2 [N, 1, K]. S need not be a multiple of `mini_batch`: tokens
    that fill the last one have rate 0. Computed in float32, in float64 for inputs of float64.
    """
    return oracle(q, k, target, rate, norm_weight, norm_bias, state, mini_batch, eps)[0]


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
    """The formulas as they are written, differentiated by autograd: the result, and the last state [B, N, ...]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    tokens = q.shape[1]
    # [C, B, N, b, K], rates [C, B, N, b, 1]
    queries, keys, targets, rates = (
        _mini_batches(tensor.to(dtype), mini_batch) for tensor in (q, k, target, rate.unsqueeze(-1))
    )
    gamma, beta = norm_weight.to(dtype).unsqueeze(1), norm_bias.to(dtype).unsqueeze(1)  # [N, 1, K]
    net = tuple(tensor.to(dtype).expand(q.shape[0], *tensor.shape) for tensor in state)
    outs = []
    for query, key, goal, step in zip(queries, keys, targets, rates, strict=True):
        net = _learn(net, key, goal, step, gamma, beta, eps)
        outs.append(query + F.layer_norm(_run(net, query), query.shape[-1:], eps=eps) * gamma + beta)
    out = torch.stack(outs, 1).transpose(2, 3).flatten(1, 2)[:, :tokens]  # [B, C, N, b, K] -> [B, S, N, K]
    return out.to(q.dtype), net


def _mini_batches(tensor: Tensor, mini_batch: int) -> Tensor:
    """[B, S, N, K] -> [C, B, N, b, K], the last mini-batch filled with zeros."""
    filled = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % mini_batch))
    return filled.unflatten(1, (-1, mini_batch)).permute(1, 0, 3, 2, 4)


def _run(net: tuple[Tensor, ...], x: Tensor) -> Tensor:
    if len(net) == _LINEAR:
        return x @ net[0] + net[1]
    return F.gelu(x @ net[0] + net[1], approximate="tanh") @ net[2] + net[3]


def _learn(
    net: tuple[Tensor, ...], key: Tensor, goal: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """The network after one step on these keys."""
    if len(net) == _LINEAR:
        w, b = net
        u = rate * _loss_grad(key @ w + b, goal, gamma, beta, eps)
        return w - key.mT @ u, b - u.sum(-2, keepdim=True)
    w1, b1, w2, b2 = net
    before = key @ w1 + b1
    hidden = F.gelu(before, approximate="tanh")
    u2 = _loss_grad(hidden @ w2 + b2, goal, gamma, beta, eps)
    u1 = rate * (u2 @ w2.mT) * _gelu_slope(before)
    u2 = rate * u2
    return (
        w1 - key.mT @ u1,
        b1 - u1.sum(-2, keepdim=True),
        w2 - hidden.mT @ u2,
        b2 - u2.sum(-2, keepdim=True),
    )


def _loss_grad(z: Tensor, goal: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Gradient of 1/2 |LN(z) - goal|^2 with respect to z."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    zhat = centred * inverse
    x = gamma * (gamma * zhat + beta - goal)
    return (x - x.mean(-1, keepdim=True) - zhat * (x * zhat).mean(-1, keepdim=True)) * inverse


def _gelu_slope(x: Tensor) -> Tensor:
    """Derivative of the tanh form of GELU."""
    c0, c1 = 0.7978845608028654, 0.044715
    t = torch.tanh(c0 * (x + c1 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c0 * (1 + 3 * c1 * x * x)
