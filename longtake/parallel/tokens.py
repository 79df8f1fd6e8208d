"""Split of a micro-batch's tokens over ranks, for sequences of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longtake.parallel.exchange import CountedGroup, Lengths
from longtake.parallel.mesh import TokenPeers


def share(whole: int, num: int, index: int, unit: int = 1) -> tuple[int, int]:
    """(offset, size) of share `index` of `num`: contiguous, in order, of whole units; sizes differ by one at most.

    The first unit is longer by what is left over, such as the one frame before the segments of a causal autoencoder.
    """
    units, left = divmod(whole, unit)
    base, extra = divmod(units, num)
    offset, size = unit * (index * base + min(index, extra)), unit * (base + (index < extra))
    return (offset + left, size) if index else (0, size + left)


@dataclass(frozen=True)
class _RankTokens:
    """Tokens of each rank of a group, and tensors without memory that are as long as this rank's and as all shares."""

    sizes: Tensor
    before: Tensor
    after: Tensor
    is_first: bool

    @classmethod
    def of(cls, sizes: Sequence[int], own: int) -> _RankTokens:
        before, after = (torch.empty(size, device="meta") for size in (sizes[own], sum(sizes)))
        for tensor in (before, after):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return cls(torch.tensor(sizes), before, after, own == 0)


@dataclass(frozen=True)
class _CutState:
    """The lengths of one forward: its ranks, the tokens each cut module returned before the cut, and the tokens in a
    unit, where that is not one."""

    peers: TokenPeers
    whole: Mapping[str, int]
    units: Mapping[str, int]
    lengths: Mapping[str, Mapping[str, _RankTokens]]  # for compiled code: of each module, among whom


class TokenCut:
    """Split of the current forward's tokens: over sequence-parallel ranks first, then over tensor-parallel ranks.

    Layers ask it for lengths, which cannot be read off a share, since shares differ by a token. It holds those of the
    last forward; `captured` restores those of an earlier one for recomputation in backward.
    """

    def __init__(self, peers: TokenPeers, tensor_units: bool = False) -> None:
        self._tensor_units = tensor_units  # tensor peers cut between units alone
        self._now = _CutState(peers, {}, {}, {})
        self._compiled = False

    @property
    def peers(self) -> TokenPeers:
        """The ranks that compute the micro-batch together."""
        return self._now.peers

    def use(self, peers: TokenPeers) -> None:
        """Make `peers` compute the next forwards."""
        self._now = _CutState(peers, {}, {}, {})

    def note(self, name: str, tokens: int) -> None:
        """Record that the module `name` returned `tokens` tokens in this forward."""
        now = self._now
        if now.whole.get(name) != tokens:
            lengths = {other: of for other, of in now.lengths.items() if other != name}
            self._now = replace(now, whole={**now.whole, name: tokens}, lengths=lengths)
        if "torch._dynamo" in sys.modules and not isinstance(self.peers.everyone, CountedGroup):
            self._find_numbers(name)

    @contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Provide the lengths of this forward, inside the context, in the form that compiled code takes."""
        for name in self._now.whole:
            self._find_numbers(name)
        self._compiled = True
        try:
            yield
        finally:
            self._compiled = False

    def _find_numbers(self, name: str) -> None:
        if name not in self._now.lengths:
            self._now = replace(self._now, lengths={**self._now.lengths, name: self._numbers(name)})

    def _numbers(self, name: str) -> dict[str, _RankTokens]:
        peers, sizes = self.peers, self.joined_sizes((name,))
        near, of_groups = peers.near, [sum(sizes[group]) for group in peers.groups]
        tensor, everyone = [own for (own,) in self._tensor_sizes((name,))], self.peer_sizes(name, entered=True)
        found = {
            "near": (sizes[near], peers.sequence_index - near.start),
            "ring": (of_groups, peers.groups.index(near)),
            "sequence": (sizes, peers.sequence_index),
            "tensor": (tensor, peers.tensor_index),
            "everyone": (everyone, peers.sequence_index * peers.tensor + peers.tensor_index),
        }
        if name in self._now.units:
            found |= {kind: (of, peers.sequence_index) for kind, of in self._dealt(name).items()}
        return {kind: _RankTokens.of(*of) for kind, of in found.items()}

    def _lengths(self, names: Sequence[str], among: str) -> Lengths:
        found = [self._now.lengths[name][among] for name in names]
        before, after = (sum(getattr(one, of).shape[0] for one in found) for of in ("before", "after"))
        return Lengths([one.sizes for one in found], before, after, found[0].is_first)

    @property
    def is_compiled(self) -> bool:
        """True if lengths are given in the form that compiled code takes."""
        return torch.compiler.is_compiling() or self._compiled

    def note_units(self, units: Mapping[str, int]) -> None:
        """Record the tokens per unit of these modules, cut between units only, and of units by their own names."""
        if self._now.units != units:
            self._now = replace(self._now, units=units, lengths={})

    def _share(self, name: str, index: int) -> tuple[int, int]:
        return share(self._now.whole[name], self.peers.sequence, index, self.unit(name))

    def sequence_share(self, name: str) -> tuple[int, int]:
        """(offset, size) of this rank's sequence share of the tokens of `name`."""
        return self._share(name, self.peers.sequence_index)

    def unit(self, name: str) -> int:
        """Tokens in a unit of the module `name`, or in the unit of that name."""
        return self._now.units.get(name, 1)

    def joined_sizes(self, names: Sequence[str]) -> list[int]:
        """Tokens of each sequence peer's share, all of `names` together."""
        return [sum(self._share(name, i)[1] for name in names) for i in range(self.peers.sequence)]

    def sequence_sizes(self, names: Sequence[str]) -> list[int] | Lengths:
        """Return the same, as compiled code has it where it is compiled."""
        return self._lengths(names, "sequence") if self.is_compiled else self.joined_sizes(names)

    def near_sizes(self, names: Sequence[str]) -> list[int] | Lengths:
        """Return the same of the peers that deal heads among each other."""
        return self._lengths(names, "near") if self.is_compiled else self.joined_sizes(names)[self.peers.near]

    def ring_sizes(self, names: Sequence[str]) -> list[int] | Lengths:
        """Tokens of each group of such peers."""
        if self.is_compiled:
            return self._lengths(names, "ring")
        sizes = self.joined_sizes(names)
        return [sum(sizes[group]) for group in self.peers.groups]

    def sizes_of_all(self, name: str) -> list[int] | Lengths:
        """Tokens of `name` on every rank, in order, cut among tensor peers too."""
        return self._lengths((name,), "everyone") if self.is_compiled else self.peer_sizes(name, entered=True)

    def dealt(self, name: str) -> tuple[list[int] | Lengths, list[int] | Lengths]:
        """Units of `name` that each sequence peer has, and of the places in a unit those that are dealt to each."""
        if self.is_compiled:
            return self._lengths((name,), "units"), self._lengths((name,), "places")
        return tuple(self._dealt(name).values())

    def _dealt(self, name: str) -> dict[str, list[int]]:
        unit, num = self.unit(name), self.peers.sequence
        units = [size // unit for size in self.joined_sizes((name,))]
        return {"units": units, "places": [share(unit, num, i)[1] for i in range(num)]}

    def tensor_share(self, name: str) -> tuple[int, int]:
        """(offset, size) of this rank's part of its own sequence share of `name`."""
        return self._tensor_share(name, self.sequence_share(name)[1], self.peers.tensor_index)

    def _tensor_share(self, name: str, whole: int, index: int) -> tuple[int, int]:
        return share(whole, self.peers.tensor, index, self.unit(name) if self._tensor_units else 1)

    def tensor_sizes(self, names: Sequence[str]) -> list[tuple[int, ...]] | Lengths:
        """For each tensor peer, its part of each of `names` in this rank's sequence share."""
        return self._lengths(names, "tensor") if self.is_compiled else self._tensor_sizes(names)

    def _tensor_sizes(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        pairs = [(name, self.sequence_share(name)[1]) for name in names]
        return [tuple(self._tensor_share(*pair, i)[1] for pair in pairs) for i in range(self.peers.tensor)]

    def peer_sizes(self, name: str, entered: bool) -> list[int]:
        """Tokens of `name` on every rank, in order; `entered`: cut among tensor peers too."""
        sizes = [self._share(name, i)[1] for i in range(self.peers.sequence)]
        if not entered:
            return sizes
        return [self._tensor_share(name, size, i)[1] for size in sizes for i in range(self.peers.tensor)]

    @property
    def whole_lengths(self) -> tuple[int, tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """Facts that lengths follow from, the same on all peers: how many share a sequence, the tokens of each module
        and those of a unit."""
        return self.peers.sequence, *(tuple(sorted(of.items())) for of in (self._now.whole, self._now.units))

    @property
    def has_empty_shares(self) -> bool:
        """True if a rank has no tokens of some module, or would get no position within a unit."""
        whole, sequence = self._now.whole, self.peers.sequence
        return any(
            0 in self.peer_sizes(name, entered=True) or 0 < self._now.units.get(name, sequence) < sequence
            for name in whole
        )

    def captured(self, inside: AbstractContextManager[Any] | None = None) -> _Captured:
        """Return the lengths of this forward, as a reusable context that restores them; `inside`: one entered
        with it."""
        return _Captured(self, self._now, inside or nullcontext())


@dataclass(frozen=True)
class _Captured:
    """Inside `with`, the cut has the lengths of an earlier forward."""

    cut: TokenCut
    forward: _CutState
    inside: AbstractContextManager[Any]
    before: list[_CutState] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(self.cut._now)
        self.cut._now = self.forward
        self.inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inside.__exit__(*error)
        self.cut._now = self.before.pop()
