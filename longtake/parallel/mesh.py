"""The mesh: the only place where ranks are computed.

Rank = ((replica * shard + shard index) * sequence + sequence index) * tensor + tensor index: tensor peers, which
communicate most, are adjacent, then sequence peers; replicas are farthest apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake.contracts import UserError
from longtake.models.plans import Exchange
from longtake.parallel.config import ParallelConfig, divisors_in_words, resolve_degrees
from longtake.parallel.exchange import CountedGroup, Group
from longtake.parallel.world import World


@dataclass(frozen=True)
class TokenPeers:
    """The ranks that compute one micro-batch together, at one sequence degree, and this rank's place among them.

    Groups of one rank are None. `ulysses` neighbouring sequence peers exchange tokens for heads; `ring` such groups
    pass keys and values around: ulysses x ring = sequence.
    """

    sequence: int
    tensor: int
    ulysses: int
    sequence_index: int
    tensor_index: int
    everyone: Group | None
    tensor_group: Group | None
    ulysses_group: Group | None
    ring_group: Group | None
    sequence_group: Group | None = None

    @classmethod
    def counted(cls, sequence: int, tensor: int, attention: str, heads: int) -> TokenPeers:
        """Return the first of so many peers, in groups that count what it would send (`CountedGroup`)."""
        ulysses = ulysses_degree(attention, sequence, heads // tensor)
        sizes = (sequence * tensor, tensor, ulysses, sequence // ulysses, sequence)
        groups = (CountedGroup() if size > 1 else None for size in sizes)
        return cls(sequence, tensor, ulysses, 0, 0, *groups)

    @property
    def count(self) -> int:
        """Ranks that compute one micro-batch together."""
        return self.sequence * self.tensor

    @property
    def ring(self) -> int:
        """Ulysses groups in the ring."""
        return self.sequence // self.ulysses

    @property
    def groups(self) -> list[slice]:
        """These groups, by their sequence peers."""
        return [slice(i, i + self.ulysses) for i in range(0, self.sequence, self.ulysses)]

    @property
    def near(self) -> slice:
        """This rank's among them."""
        return self.groups[self.sequence_index // self.ulysses]


@dataclass(frozen=True)
class Mesh:
    """The world as axes named by use.

    Data is split over replicate x shard; the ranks of sequence x tensor (peers) compute the same micro-batch. Weights
    are sharded over shard x sequence x tensor: peers hold the same weights, so they can share them like any others.
    """

    replicate: int
    shard: int
    sequence: int
    tensor: int
    rank: int
    config: ParallelConfig
    weights: DeviceMesh  # the axes that weights live on: ("shard",), or ("replicate", "shard") when replicate > 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks or groups of peers that read different data; the loss is the mean over them."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Index of the data rank that this rank belongs to."""
        return self.rank // self.num_peers

    @property
    def num_peers(self) -> int:
        """Ranks that compute the same micro-batch."""
        return self.sequence * self.tensor

    @property
    def peer_index(self) -> int:
        """This rank's place among its peers. Peer 0 reports what is counted once per micro-batch."""
        return self.rank % self.num_peers

    @property
    def size(self) -> int:
        """All ranks."""
        return self.data_ranks * self.num_peers

    @classmethod
    def create(cls, config: ParallelConfig, world: World) -> Mesh:
        """Check the degrees against the world. Collective. Raises `UserError` listing what would fit."""
        replicate, shard, sequence, tensor = resolve_degrees(config, world.size)
        node = world.node_size
        if node % tensor:
            raise UserError(
                f"parallel.tensor = {tensor}: tensor peers must lie in one node and this one runs {node} processes; "
                f"choose one of {divisors_in_words(math.gcd(node, world.size))}"
            )
        axes = (replicate, shard * sequence * tensor)
        names = ("replicate", "shard")
        if replicate == 1:
            axes, names = axes[1:], names[1:]
        weights = init_device_mesh(world.device.type, axes, mesh_dim_names=names)
        return cls(replicate, shard, sequence, tensor, world.rank, config, weights)

    def check_model(self, kind: type[Any], heads: int) -> None:
        """Raise `UserError` where a denoiser class has no plan for these degrees or its heads do not divide."""
        plan = kind.sequence_plan
        if self.sequence > 1 and plan is None:
            raise UserError(f"parallel.sequence = {self.sequence}: this model has no plan for it; choose 1")
        if self.tensor > 1 and (kind.tensor_plan is None or plan is None):
            raise UserError(f"parallel.tensor = {self.tensor}: this model has no plan for it; choose 1")
        if heads % self.tensor:
            raise UserError(
                f"parallel.tensor = {self.tensor}: {heads} attention heads do not divide by it; "
                f"choose one of {divisors_in_words(heads)}"
            )
        own = heads // self.tensor
        exchanges = () if plan is None else plan.exchanges.values()
        needs_heads = any(isinstance(exchange, Exchange) and not exchange.ring for exchange in exchanges)
        if needs_heads and own % self.sequence:
            raise UserError(
                f"parallel.sequence = {self.sequence}: {own} heads do not divide by it, as this model needs; choose "
                f"one of {divisors_in_words(own)}"
            )
        if self.config.sequence_attention == "ulysses" and own % self.sequence:
            beside = f" ({heads} / tensor {self.tensor})" if self.tensor > 1 else ""
            raise UserError(
                f"parallel.sequence = {self.sequence}: {own} attention heads{beside} do not divide by it; "
                f'choose one of {divisors_in_words(own)}, or parallel.sequence_attention = "auto"'
            )

    def subgroup_place(self, sequence: int) -> tuple[int, int]:
        """Return which of the `self.sequence / sequence` subgroups of its data rank this rank belongs to at a smaller
        sequence degree, and its index among those `sequence * tensor` ranks."""
        return divmod(self.peer_index, sequence * self.tensor)

    def subgroup(self, sequence: int, backend: str | None = None) -> dist.ProcessGroup | None:
        """Return a process group of this rank's subgroup; None where it is alone. Collective over the world."""
        block = sequence * self.tensor
        return _own_group([list(range(first, first + block)) for first in range(0, self.size, block)], backend)

    def token_peers(self, heads: int, sequence: int | None = None) -> TokenPeers:
        """Return the ranks that compute a micro-batch together at a sequence degree that divides the mesh's (default:
        it).

        At a smaller degree d the sequence peers fall into `sequence / d` subgroups, each with a micro-batch of its
        own. Collective over the world: every rank calls it with the same arguments, in the same order.
        """
        sequence = self.sequence if sequence is None else sequence
        assert self.sequence % sequence == 0, f"{sequence} peers out of {self.sequence}"
        ulysses = ulysses_degree(self.config.sequence_attention, sequence, heads // self.tensor)
        block = sequence * self.tensor
        first = self.rank - self.rank % block
        index, tensor_index = divmod(self.rank - first, self.tensor)
        starts = range(0, self.size, block)

        def group(*ranks: Iterable[int]) -> dist.ProcessGroup | None:
            """Return the groups of the first block of ranks, repeated for every block; the one that holds this rank."""
            return _own_group([[start + rank for rank in one] for start in starts for one in ranks])

        tensor = self.tensor
        return TokenPeers(
            sequence=sequence,
            tensor=tensor,
            ulysses=ulysses,
            sequence_index=index,
            tensor_index=tensor_index,
            everyone=group(range(block)),
            tensor_group=group(*(range(i, i + tensor) for i in range(0, block, tensor))),
            ulysses_group=group(
                *(
                    range(i + t, i + ulysses * tensor, tensor)
                    for i in range(0, block, ulysses * tensor)
                    for t in range(tensor)
                )
            ),
            ring_group=group(*(range(i, block, ulysses * tensor) for i in range(ulysses * tensor))),
            sequence_group=group(*(range(i, block, tensor) for i in range(tensor))),
        )


def ulysses_degree(attention: str, sequence: int, heads: int) -> int:
    """Return the number of `sequence` ranks that share `heads` heads by Ulysses; groups of so many form a ring."""
    return 1 if attention == "ring" else math.gcd(sequence, heads)


def _own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    if len(groups[0]) == 1:
        return None
    own, _ = dist.new_subgroups_by_enumeration(groups, backend=backend)
    return own
