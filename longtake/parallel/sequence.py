"""Sequence parallelism from a model's `sequence_plan`: tokens are cut after the embedders and gathered at the end.

In between, every layer sees only its rank's tokens; attention exchanges them: Ulysses (Jacobs et al. 2023) trades heads
for tokens, combined with ring attention where there are more peers than heads. The model's code is unchanged: hooks cut
and gather, and the attention submodule is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longtake.models import Exchange, Halo, Sum, Switch
from longtake.parallel.exchange import fold_halo, gather_output, sum_of_all, switch, with_halo
from longtake.parallel.ring import ring_attention
from longtake.parallel.tokens import TokenCut, share

Exchanged = Exchange | Switch | Halo | Sum


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
    text = args[2].get("text") if len(args) > 2 else None
    sizes = type(model).units(model.config, tuple(args[0].shape[1:]), 0 if text is None else text.shape[-2])
    cut.note_units({**sizes, **{name: sizes[unit] for name, unit in units.items()}})


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
    """A submodule in which the tokens of all peers meet, called with this rank's share (`models.plans`).

    Shares may have any lengths. Differentiable.
    """

    def __init__(self, inner: nn.Module, cut: TokenCut, exchanged: Exchanged) -> None:
        super().__init__()
        if next(inner.parameters(), None) is None:
            self.inner = inner
        else:  # its tensors keep their names
            object.__setattr__(self, "inner", inner)
            self._parameters, self._buffers, self._modules = inner._parameters, inner._buffers, inner._modules
        self._cut, self.exchanged = cut, exchanged
        self._apart = cut.uncompiled(AmongPeers._exchange_and_run)

    def forward(self, *args: Any) -> Any:
        peers, how = self._cut.peers, self.exchanged
        meeting = peers.count if isinstance(how, Exchange) and how.by_tensor_peers else peers.sequence
        return self.inner(*args) if meeting == 1 else self._apart(self, *args)

    def _exchange_and_run(self, *args: Any) -> Any:
        group, how = self._cut.peers.sequence_group, self.exchanged
        if isinstance(how, Exchange):
            return (self._at_heads_of_all if how.by_tensor_peers else self._at_own_heads)(how, *args)
        if isinstance(how, Switch):
            return self._at_own_places(how, args)
        if isinstance(how, Sum):
            return sum_of_all(self.inner(*args), group)
        width, sizes = self._cut.unit(how.width), self._cut.joined_sizes((how.split,))
        given = args[: how.tensors]
        behind = with_halo(given, width, sizes, group)
        out = self.inner(*behind, *args[how.tensors :])
        found, *others = (out,) if isinstance(out, Tensor) else out
        if any(one.requires_grad for one in behind) and not sizes[self._cut.peers.sequence_index]:
            found = found + sum(0 * one.sum() for one in behind)  # backward is collective all the same
        folded = fold_halo(found, width, sizes, group)
        return folded if isinstance(out, Tensor) else (folded, *others)

    def _at_own_heads(self, how: Exchange, first: Tensor, *args: Any) -> Tensor:
        peers = self._cut.peers
        others, beside = _tensors_first(args)
        sizes = self._cut.joined_sizes(how.queries)
        of_others = sizes if how.keys is None else self._cut.joined_sizes(how.keys)
        for tensor, expected in ((first, sizes), *((one, of_others) for one in others)):
            assert tensor.shape[1] == expected[peers.sequence_index], f"{tensor.shape[1]} tokens, shares of {expected}"
        start = peers.sequence_index - peers.sequence_index % peers.ulysses
        near, near_others = (of[start : start + peers.ulysses] for of in (sizes, of_others))
        heads = [first.shape[2] // peers.ulysses] * peers.ulysses
        if peers.ulysses > 1:
            if near == near_others:
                first, *others = _switched((first, *others), near, heads, peers.ulysses_group)
            else:
                (first,) = _switched((first,), near, heads, peers.ulysses_group)
                others = _switched(others, near_others, heads, peers.ulysses_group)
        if peers.ring > 1:
            lengths = [sum(of_others[i : i + peers.ulysses]) for i in range(0, peers.sequence, peers.ulysses)]
            out = ring_attention(first, *others, lengths, peers.ring_group, self.inner.backend)
        else:
            offset = peers.sequence_index % peers.ulysses * heads[0]
            out = self._run_heads(how, offset, heads[0], first, *others, *beside)
        if peers.ulysses > 1:
            out = switch(out.transpose(1, 2), heads, near, peers.ulysses_group).transpose(1, 2)
        return out

    def _at_heads_of_all(self, how: Exchange, first: Tensor, *args: Any) -> Tensor:
        peers, (others, beside) = self._cut.peers, _tensors_first(args)
        (name,) = how.queries
        sizes, own = self._cut.peer_sizes(name, entered=True), peers.sequence_index * peers.tensor + peers.tensor_index
        assert first.shape[1] == sizes[own], f"{first.shape[1]} tokens, shares of {sizes}"
        heads = [first.shape[2] // peers.count] * peers.count
        tensors = _switched((first, *others), sizes, heads, peers.everyone)
        out = self._run_heads(how, own * heads[0], heads[0], *tensors, *beside)
        return switch(out.transpose(1, 2), heads, sizes, peers.everyone).transpose(1, 2)

    def _run_heads(self, how: Exchange, offset: int, count: int, *args: Any) -> Tensor:
        """The submodule with `count` of its heads."""
        whole = {name: p for name, p in self.inner.named_parameters(recurse=False) if name in how.of_heads}
        own = {name: p.narrow(0, offset, count) for name, p in whole.items()}
        return torch.func.functional_call(self.inner, own, args) if own else self.inner(*args)

    def _at_own_places(self, how: Switch, tensors: Sequence[Tensor]) -> Tensor:
        peers, unit, own = self._cut.peers, self._cut.unit(how.split), self._cut.peers.sequence_index
        units = [size // unit for size in self._cut.joined_sizes((how.split,))]
        places = [share(unit, peers.sequence, i)[1] for i in range(peers.sequence)]
        assert tensors[0].shape[1:3] == (units[own], unit), f"{list(tensors[0].shape)}, units {units} of {unit} tokens"
        out = self.inner(*_switched(tensors, units, places, peers.sequence_group)).transpose(1, 2)
        return switch(out, places, units, peers.sequence_group).transpose(1, 2)


def _tensors_first(args: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return tensors, [arg for arg in args if not isinstance(arg, Tensor)]


def _switched(tensors: Sequence[Tensor], rows: list[int], columns: list[int], group: Any) -> tuple[Tensor, ...]:
    """`switch` of several tensors, which may differ in their last dim, in one exchange."""
    if len({x.shape for x in tensors}) > 1:
        widths = [x.shape[-1] for x in tensors]
        return switch(torch.cat(list(tensors), -1), rows, columns, group).split(widths, -1)
    return switch(torch.cat(list(tensors)), rows, columns, group).chunk(len(tensors))
