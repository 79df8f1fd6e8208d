"""Sequence parallelism from a model's `sequence_plan`: tokens are cut after the embedders and gathered at the end.

In between, every layer sees only its rank's tokens; attention exchanges them: Ulysses (Jacobs et al. 2023) trades heads
for tokens, combined with ring attention where there are more peers than heads. The model's code is unchanged: hooks cut
and gather, and the attention submodule is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longtake.models import Exchange
from longtake.parallel.exchange import exchange, gather_output
from longtake.parallel.ring import ring_attention
from longtake.parallel.tokens import TokenCut


def cut_sequence(model: nn.Module, cut: TokenCut) -> None:
    """Applies `model.sequence_plan`: from now on the peers of `cut` compute each forward together."""
    plan = model.sequence_plan
    modules = dict(model.named_modules())
    for name, dim in plan.split.items():
        if name in modules:  # the config leaves some out
            modules[name].register_forward_hook(partial(_cut_output, cut, name, dim))
    for name, tokens in plan.gather.items():
        entered = any(tokens in names for names in plan.entry.values())
        modules[name].register_forward_hook(partial(_collect_output, cut, tokens, entered))
    for pattern, exchanged in plan.exchanges.items():
        for name, inner in matching(model, pattern):
            model.set_submodule(name, AmongPeers(inner, cut, exchanged))
    if plan.units:
        model.register_forward_pre_hook(partial(_note_units, cut, plan.units))


def _note_units(cut: TokenCut, units: Mapping[str, str], model: nn.Module, args: Any) -> None:
    sizes = type(model).units(model.config, tuple(args[0].shape[1:]))
    cut.note_units({name: sizes[unit] for name, unit in units.items()})


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The submodules whose names match a pattern of a plan, in which `*` is a number."""
    found = [("", model)]
    for part in pattern.split("."):
        found = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in parent.named_children()
            if child == part or (part == "*" and child.isdigit())
        ]
    return found


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


class AmongPeers(nn.Module):
    """A submodule that mixes the tokens of all peers, such as attention, called with this rank's share (`Exchange`).

    Shares may have any lengths. Differentiable.
    """

    _apart: ClassVar[Callable[..., Tensor] | None] = None  # left out of compiled code; one function for all blocks

    def __init__(self, inner: nn.Module, cut: TokenCut, exchanged: Exchange) -> None:
        super().__init__()
        self.inner, self.exchanged = inner, exchanged
        self._cut = cut
        if AmongPeers._apart is None:  # here, for it imports the compiler
            AmongPeers._apart = staticmethod(torch.compiler.disable(AmongPeers._exchange_and_run))

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        if self._cut.peers.sequence == 1:
            return self.inner(first, *others)
        return self._apart(self, first, *others)

    def _exchange_and_run(self, first: Tensor, *others: Tensor) -> Tensor:
        peers, own = self._cut.peers, self.exchanged
        sizes = self._cut.joined_sizes(own.queries)
        of_others = sizes if own.keys is None else self._cut.joined_sizes(own.keys)
        for tensor, expected in ((first, sizes), *((one, of_others) for one in others)):
            assert tensor.shape[1] == expected[peers.sequence_index], f"{tensor.shape[1]} tokens, shares of {expected}"
        start = peers.sequence_index - peers.sequence_index % peers.ulysses
        near, near_others = (of[start : start + peers.ulysses] for of in (sizes, of_others))
        if peers.ulysses > 1:
            if near == near_others:
                first, *others = _tokens_for_heads((first, *others), near, peers.ulysses_group)
            else:
                (first,) = _tokens_for_heads((first,), near, peers.ulysses_group)
                others = _tokens_for_heads(tuple(others), near_others, peers.ulysses_group)
        if peers.ring > 1:
            lengths = [sum(of_others[i : i + peers.ulysses]) for i in range(0, peers.sequence, peers.ulysses)]
            out = ring_attention(first, *others, lengths, peers.ring_group, self.inner.backend)
        else:
            out = self.inner(first, *others)
        if peers.ulysses > 1:
            out = _heads_for_tokens(out, near, peers.sequence_index - start, peers.ulysses_group)
        return out


def _tokens_for_heads(tensors: Sequence[Tensor], sizes: list[int], group: Any) -> tuple[Tensor, ...]:
    """[B, l, N, K] of own tokens -> [B, L, N / u, K]: the tokens of all u ranks, own heads. One exchange for all."""
    u = len(sizes)
    rows = torch.stack([x.unflatten(2, (u, -1)) for x in tensors])  # [n, B, l, u, N / u, K]
    rows = rows.permute(3, 2, 1, 0, 4, 5).flatten(0, 1)  # [u * l, B, n, N / u, K]
    rows = exchange(rows, [tensors[0].shape[1]] * u, sizes, group)
    return tuple(x.transpose(0, 1) for x in rows.unbind(2))


def _heads_for_tokens(out: Tensor, sizes: list[int], index: int, group: Any) -> Tensor:
    """[B, L, N / u, K] -> [B, l, N, K], the way back."""
    u, own = len(sizes), sizes[index]
    rows = exchange(out.transpose(0, 1), sizes, [own] * u, group)  # [u * l, B, N / u, K]
    return rows.unflatten(0, (u, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)
