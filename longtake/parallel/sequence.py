"""Sequence parallelism from a model's `sequence_plan`: tokens are cut after the embedders and collected at the end.

Between the two, every layer sees its own tokens only; attention, the one place where tokens meet, exchanges them:
Ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023) deals heads out in return for tokens, and where there are more peers
than heads, ring attention goes on from there. The model's code is left as it is: hooks cut and collect, and the
attention submodule is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longtake.parallel.exchange import exchange, gather_output
from longtake.parallel.ring import ring_attention
from longtake.parallel.tokens import TokenCut


def cut_sequence(model: nn.Module, cut: TokenCut) -> None:
    """Applies `model.sequence_plan`: from here on forwards of the peers of `cut` make up one forward."""
    plan = model.sequence_plan
    modules = dict(model.named_modules())
    for name, dim in plan.split.items():
        if name in modules:  # the config leaves some out
            modules[name].register_forward_hook(partial(_cut_output, cut, name, dim))
    for name, tokens in plan.gather.items():
        entered = any(tokens in names for names in plan.entry.values())
        modules[name].register_forward_hook(partial(_collect_output, cut, tokens, entered))
    for pattern in plan.attention:
        for name, inner in matching(model, pattern):
            model.set_submodule(name, PeerAttention(inner, cut, plan.joined))


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The submodules whose names fit a pattern of a plan, in which `*` stands for a number."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    yield from [(name, module) for name, module in model.named_modules() if wanted.fullmatch(name)]


def _cut_output(cut: TokenCut, name: str, dim: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    cut.note(name, out.shape[dim])
    if cut.peers.sequence == 1:
        return out
    offset, size = cut.sequence_share(name)
    return out.narrow(dim, offset, size).clone()  # a view would keep the whole in memory


def _collect_output(cut: TokenCut, tokens: str, entered: bool, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    if cut.peers.everyone is None:
        return out
    return gather_output(out, cut.peer_sizes(tokens, entered), cut.peers.everyone)


class PeerAttention(nn.Module):
    """Attention of all peers' tokens to all peers' tokens, called with this rank's share: q, k, v [B, l, N, K].

    Any number of tokens: what travels is cut by the true lengths of the shares. Gradients flow through.
    """

    _apart: ClassVar[Callable[..., Tensor] | None] = None  # left out of compiled code; one function for all blocks

    def __init__(self, inner: nn.Module, cut: TokenCut, joined: tuple[str, ...]) -> None:
        super().__init__()
        self.inner, self.joined = inner, joined
        self._cut = cut
        if PeerAttention._apart is None:  # here, for it imports the compiler
            PeerAttention._apart = staticmethod(torch.compiler.disable(PeerAttention._exchange_and_attend))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._cut.peers.sequence == 1:
            return self.inner(q, k, v)
        return self._apart(self, q, k, v)

    def _exchange_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        peers = self._cut.peers
        sizes = self._cut.joined_sizes(self.joined)
        assert q.shape[1] == k.shape[1] == sizes[peers.sequence_index], f"{q.shape[1]} tokens, shares of {sizes}"
        first = peers.sequence_index - peers.sequence_index % peers.ulysses
        near = sizes[first : first + peers.ulysses]
        if peers.ulysses > 1:
            q, k, v = _tokens_for_heads(q, k, v, near, peers.ulysses_group)
        if peers.ring > 1:
            lengths = [sum(sizes[i : i + peers.ulysses]) for i in range(0, peers.sequence, peers.ulysses)]
            out = ring_attention(q, k, v, lengths, peers.ring_group, self.inner.backend)
        else:
            out = self.inner(q, k, v)
        if peers.ulysses > 1:
            out = _heads_for_tokens(out, near, peers.sequence_index - first, peers.ulysses_group)
        return out


def _tokens_for_heads(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], group: Any) -> tuple[Tensor, ...]:
    """q, k, v [B, l, N, K] of own tokens -> [B, L, N / u, K]: the tokens of all u ranks, own heads. One exchange."""
    u = len(sizes)
    rows = torch.stack([x.unflatten(2, (u, -1)) for x in (q, k, v)])  # [3, B, l, u, N / u, K]
    rows = rows.permute(3, 2, 1, 0, 4, 5).flatten(0, 1)  # [u * l, B, 3, N / u, K]
    rows = exchange(rows, [q.shape[1]] * u, sizes, group)
    return tuple(x.transpose(0, 1) for x in rows.unbind(2))


def _heads_for_tokens(out: Tensor, sizes: list[int], index: int, group: Any) -> Tensor:
    """[B, L, N / u, K] -> [B, l, N, K], the way back."""
    u, own = len(sizes), sizes[index]
    rows = exchange(out.transpose(0, 1), sizes, [own] * u, group)  # [u * l, B, N / u, K]
    return rows.unflatten(0, (u, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)
