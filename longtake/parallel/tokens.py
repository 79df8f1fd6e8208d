"""Which tokens of a micro-batch a rank has: a rule for shares of any length, and the lengths of this forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longtake.parallel.mesh import TokenPeers


def share(whole: int, num: int, index: int) -> tuple[int, int]:
    """(offset, size) of share `index` of `num`: contiguous, in order, sizes differ by one at most."""
    base, extra = divmod(whole, num)
    return index * base + min(index, extra), base + (index < extra)


@dataclass(frozen=True)
class _Forward:
    """What is known of one forward: who computes it, and how many tokens each cut module gave before the cut."""

    peers: TokenPeers
    whole: Mapping[str, int]


class TokenCut:
    """How the tokens of the forward under way are cut. Tokens are shared by sequence peers first, then by tensor peers.

    Layers ask it for lengths, since they cannot be read off a share: shares differ by a token. It holds those of the
    last forward; `captured` brings back those of an earlier one, for what recomputation in backward needs.
    """

    def __init__(self, peers: TokenPeers) -> None:
        self._now = _Forward(peers, {})

    @property
    def peers(self) -> TokenPeers:
        """Who computes the micro-batch together."""
        return self._now.peers

    def use(self, peers: TokenPeers) -> None:
        """The forwards from now on are made by `peers`."""
        self._now = _Forward(peers, {})

    def note(self, name: str, tokens: int) -> None:
        """The module `name` gave `tokens` tokens in this forward."""
        if self._now.whole.get(name) != tokens:
            self._now = _Forward(self.peers, {**self._now.whole, name: tokens})

    def sequence_share(self, name: str) -> tuple[int, int]:
        """(offset, size) of this rank's sequence share of the tokens of `name`."""
        return share(self._now.whole[name], self.peers.sequence, self.peers.sequence_index)

    def joined_sizes(self, names: Sequence[str]) -> list[int]:
        """Tokens of each sequence peer's share, all of `names` together."""
        return [
            sum(share(self._now.whole[name], self.peers.sequence, i)[1] for name in names)
            for i in range(self.peers.sequence)
        ]

    def tensor_share(self, name: str) -> tuple[int, int]:
        """(offset, size) of this rank's part of its own sequence share of `name`."""
        return share(self.sequence_share(name)[1], self.peers.tensor, self.peers.tensor_index)

    def tensor_sizes(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """For each tensor peer, its part of each of `names` in this rank's sequence share."""
        wholes = [self.sequence_share(name)[1] for name in names]
        return [tuple(share(whole, self.peers.tensor, i)[1] for whole in wholes) for i in range(self.peers.tensor)]

    def peer_sizes(self, name: str, entered: bool) -> list[int]:
        """Tokens of `name` on every rank that takes part, in order; `entered`: cut among tensor peers too."""
        tensor = self.peers.tensor if entered else 1
        sizes = [share(self._now.whole[name], self.peers.sequence, i)[1] for i in range(self.peers.sequence)]
        return [share(size, tensor, i)[1] for size in sizes for i in range(tensor)]

    def captured(self) -> _Captured:
        """The lengths as they are now; `with` it they are brought back, as often as need be."""
        return _Captured(self, self._now)


@dataclass(frozen=True)
class _Captured:
    """Inside `with`, the cut is as it was."""

    cut: TokenCut
    forward: _Forward
    before: list[_Forward] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(self.cut._now)
        self.cut._now = self.forward

    def __exit__(self, *error: object) -> None:
        self.cut._now = self.before.pop()
