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

from longtake.models.plans import Exchange, Halo, Sum, Switch
from longtake.parallel.exchange import (
    Map,
    fold_halo,
    gather_output,
    sum_of_all,
    switch,
    switch_back,
    to_heads,
    to_tokens,
    with_halo,
)
from longtake.parallel.ring import ring_attention
from longtake.parallel.tokens import TokenCut

Exchanged = Exchange | Switch | Halo | Sum


def cut_sequence(model: nn.Module, cut: TokenCut) -> None:
    """Apply `model.sequence_plan`: from now on the peers of `cut` compute each forward together."""
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
    """Return the submodules whose names match a pattern of a plan, in which `*` is a number."""
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
    """A submodule that mixes the tokens of all ranks, called with this rank's shard (`models.plans`).

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

    def forward(self, *args: Any) -> Any:
        peers, how = self._cut.peers, self.exchanged
        meeting = peers.count if isinstance(how, Exchange) and how.by_tensor_peers else peers.sequence
        return self.inner(*args) if meeting == 1 else self._exchange_and_run(*args)

    def _exchange_and_run(self, *args: Any) -> Any:
        group, how = self._cut.peers.sequence_group, self.exchanged
        if isinstance(how, Exchange):
            return (self._at_heads_of_all if how.by_tensor_peers else self._at_own_heads)(how, *args)
        if isinstance(how, Switch):
            return self._at_own_places(how, args)
        if isinstance(how, Sum):
            return sum_of_all(self.inner(*args), group, self._cut.is_compiled)
        width, sizes = self._cut.unit(how.width), self._cut.sequence_sizes((how.split,))
        given = args[: how.tensors]
        behind = with_halo(given, width, sizes, group)
        out = self.inner(*behind, *args[how.tensors :])
        found, *others = (out,) if isinstance(out, Tensor) else out
        is_empty = isinstance(sizes, list) and not sizes[self._cut.peers.sequence_index]
        if is_empty and any(one.requires_grad for one in behind):
            found = found + sum(0 * one.sum() for one in behind)  # backward is collective all the same
        (folded,) = fold_halo([found], width, sizes, group)
        return folded if isinstance(out, Tensor) else (folded, *others)

    def _at_own_heads(self, how: Exchange, first: Tensor, *args: Any) -> Tensor:
        peers, cut = self._cut.peers, self._cut
        others, beside = _tensors_first(args)
        keys, heads = how.keys or how.queries, first.shape[2] // peers.ulysses
        sizes = cut.near_sizes(how.queries)
        if peers.ulysses > 1:
            dealt = partial(to_heads, heads=heads, group=peers.ulysses_group)
            if how.keys is None:
                first, *others = _switched((first, *others), partial(dealt, tokens=sizes))
            else:
                first = dealt(first, sizes)
                others = _switched(others, partial(dealt, tokens=cut.near_sizes(keys)))
        if peers.ring > 1:
            out = ring_attention(first, *others, cut.ring_sizes(keys), peers.ring_group, self.inner.backend)
        else:
            offset = peers.sequence_index % peers.ulysses * heads
            out = self._run_heads(how, offset, heads, first, *others, *beside)
        return to_tokens(out, sizes, heads, peers.ulysses_group) if peers.ulysses > 1 else out

    def _at_heads_of_all(self, how: Exchange, first: Tensor, *args: Any) -> Tensor:
        peers, (others, beside) = self._cut.peers, _tensors_first(args)
        (name,) = how.queries
        sizes, heads = self._cut.sizes_of_all(name), first.shape[2] // peers.count
        dealt = partial(to_heads, tokens=sizes, heads=heads, group=peers.everyone)
        tensors = _switched((first, *others), dealt)
        offset = (peers.sequence_index * peers.tensor + peers.tensor_index) * heads
        out = self._run_heads(how, offset, heads, *tensors, *beside)
        return to_tokens(out, sizes, heads, peers.everyone)

    def _run_heads(self, how: Exchange, offset: int, count: int, *args: Any) -> Tensor:
        """Return the submodule with `count` of its heads."""
        whole = {name: p for name, p in self.inner.named_parameters(recurse=False) if name in how.of_heads}
        own = {name: p.narrow(0, offset, count) for name, p in whole.items()}
        return torch.func.functional_call(self.inner, own, args) if own else self.inner(*args)

    def _at_own_places(self, how: Switch, tensors: Sequence[Tensor]) -> Tensor:
        units, places = self._cut.dealt(how.split)
        group = self._cut.peers.sequence_group
        there = partial(switch, rows=units, columns=places, group=group)
        return switch_back(self.inner(*_switched(tensors, there)), units, places, group)


def _tensors_first(args: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return tensors, [arg for arg in args if not isinstance(arg, Tensor)]


def _switched(tensors: Sequence[Tensor], exchanged: Map) -> tuple[Tensor, ...]:
    """Several tensors, which may differ in their last dim, in one exchange."""
    if len({x.shape[-1] for x in tensors}) > 1:
        return exchanged(torch.cat(list(tensors), -1)).split([x.shape[-1] for x in tensors], -1)
    return exchanged(torch.cat(list(tensors))).chunk(len(tensors))
