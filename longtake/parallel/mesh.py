"""The mesh: one object that knows which rank does what. Nobody else computes ranks.

Rank = ((replica * shard + shard index) * sequence + sequence index) * tensor + tensor index: tensor peers, which talk
most, are neighbours; then come sequence peers; replicas are farthest apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake.config import Section
from longtake.contracts import UserError
from longtake.parallel.world import World

AXES = ("replicate", "shard", "sequence", "tensor")
Degree = PositiveInt | Literal["auto"]


class ParallelConfig(Section):
    """How the model and the data are spread over the ranks. One of the four degrees may be "auto": what is left."""

    replicate: Degree = Field(1, description="groups that each hold the whole model (HSDP when above 1)")
    shard: Degree = Field("auto", description="ranks of a group that read different data and share its weights")
    sequence: Degree = Field(1, description="ranks that share the tokens of one micro-batch; they share weights too")
    tensor: Degree = Field(1, description="ranks of one node that share each block's heads and MLP, and its tokens")
    bucket_sequence: dict[str, dict[PositiveInt, PositiveInt]] | Literal["auto"] | None = Field(
        None,
        description="sequence degree by entry, keyed like bucket_config; `auto`: the smallest that gives no rank more "
        "tokens than the largest entry does; None: parallel.sequence for all",
    )
    sequence_attention: Literal["auto", "ulysses", "ring"] = Field(
        "auto", description="how sequence peers attend: `ulysses` deals heads, `ring` passes keys; `auto`: ring beyond"
    )
    zero: Literal[2, 3] = Field(3, description="3 frees gathered weights after the forward, 2 keeps them for backward")
    forward_prefetch: NonNegativeInt = Field(0, description="blocks gathered ahead in forward; 0: PyTorch's own choice")
    backward_prefetch: NonNegativeInt = Field(0, description="the same in backward")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype in which gradients are summed over ranks")
    cpu_offload: bool = Field(False, description="masters, gradients and optimizer states live in the CPU's memory")

    @model_validator(mode="after")
    def _one_auto(self) -> ParallelConfig:
        found = [axis for axis in AXES if getattr(self, axis) == "auto"]
        if len(found) > 1:
            raise ValueError(
                f'parallel.{" and parallel.".join(found)} = "auto": only one degree can follow from the others; '
                'write all but one as numbers (shard is "auto" where it is not given)'
            )
        return self


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
    everyone: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    ring_group: dist.ProcessGroup | None

    @property
    def count(self) -> int:
        """Ranks that compute one micro-batch together."""
        return self.sequence * self.tensor

    @property
    def ring(self) -> int:
        """Ulysses groups in the ring."""
        return self.sequence // self.ulysses


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
        """Places that read different data; the loss is the mean over them."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.num_peers

    @property
    def num_peers(self) -> int:
        """Ranks that compute the same micro-batch."""
        return self.sequence * self.tensor

    @property
    def peer_index(self) -> int:
        """This rank's place among its peers. Peer 0 counts where something is to be counted once."""
        return self.rank % self.num_peers

    @property
    def size(self) -> int:
        """All ranks."""
        return self.data_ranks * self.num_peers

    @classmethod
    def create(cls, config: ParallelConfig, world: World) -> Mesh:
        """Checks the degrees against the world. Collective. Raises `UserError` listing what would fit."""
        replicate, shard, sequence, tensor = resolve_degrees(config, world.size)
        node = world.local_size or world.size
        if node % tensor:
            raise UserError(
                f"parallel.tensor = {tensor}: tensor peers must lie in one node and this one runs {node} processes; "
                f"choose one of {one_of(divisors(math.gcd(node, world.size)))}"
            )
        axes = (replicate, shard * sequence * tensor)
        names = ("replicate", "shard")
        if replicate == 1:
            axes, names = axes[1:], names[1:]
        weights = init_device_mesh(world.device.type, axes, mesh_dim_names=names)
        return cls(replicate, shard, sequence, tensor, world.rank, config, weights)

    def check_heads(self, heads: int) -> None:
        """Raises `UserError` where `heads` attention heads cannot be shared as the config asks."""
        if heads % self.tensor:
            raise UserError(
                f"parallel.tensor = {self.tensor}: {heads} attention heads do not divide by it; "
                f"choose one of {one_of(divisors(heads))}"
            )
        own = heads // self.tensor
        if self.config.sequence_attention == "ulysses" and own % self.sequence:
            beside = f" ({heads} / tensor {self.tensor})" if self.tensor > 1 else ""
            raise UserError(
                f"parallel.sequence = {self.sequence}: {own} attention heads{beside} do not divide by it; "
                f'choose one of {one_of(divisors(own))}, or parallel.sequence_attention = "auto"'
            )

    def neighbourhood(self, sequence: int) -> tuple[int, int]:
        """Which of the `self.sequence / sequence` neighbourhoods of its data rank this rank belongs to at a smaller
        sequence degree, and its place among those `sequence * tensor` ranks."""
        return divmod(self.peer_index, sequence * self.tensor)

    def neighbours(self, sequence: int, backend: str | None = None) -> dist.ProcessGroup | None:
        """This rank's neighbourhood as a group of its own; None where it is alone. Collective over the world."""
        block = sequence * self.tensor
        return _own_group([list(range(first, first + block)) for first in range(0, self.size, block)], backend)

    def token_peers(self, heads: int, sequence: int | None = None) -> TokenPeers:
        """The ranks that compute a micro-batch together at a sequence degree that divides the mesh's (default: it).

        At a smaller degree d the sequence peers fall into `sequence / d` neighbourhoods, each with a micro-batch of its
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
            """Groups of the first block of ranks, repeated for every block; the one that holds this rank."""
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
        )


def ulysses_degree(attention: Literal["auto", "ulysses", "ring"], sequence: int, heads: int) -> int:
    """How many of `sequence` peers deal out `heads` heads among themselves; such groups pass keys round a ring."""
    return 1 if attention == "ring" else math.gcd(sequence, heads)


def _own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    if len(groups[0]) == 1:
        return None
    own, _ = dist.new_subgroups_by_enumeration(groups, backend=backend)
    return own


def resolve_degrees(config: ParallelConfig, size: int) -> tuple[int, ...]:
    """(replicate, shard, sequence, tensor) as numbers. Raises `UserError` where they do not make `size` ranks."""
    degrees = {axis: getattr(config, axis) for axis in AXES}
    fixed = {axis: degree for axis, degree in degrees.items() if degree != "auto"}
    free = next((axis for axis, degree in degrees.items() if degree == "auto"), None)
    product = math.prod(fixed.values())
    if free is not None and size % product == 0:
        return tuple((degrees | {free: size // product}).values())
    if free is None and product == size:
        return tuple(degrees.values())
    above_one = {axis: degree for axis, degree in fixed.items() if degree > 1} or fixed
    said = " x ".join(f"parallel.{axis}" for axis in above_one)
    numbers = " x ".join(str(degree) for degree in above_one.values())
    if free is None:
        others = product // fixed["shard"]
        remedy = f'shard = {size // others} or "auto"' if size % others == 0 else "degrees whose product is that"
        raise UserError(f"{said} = {numbers}: makes {product} ranks but {size} are running; choose {remedy}")
    what = f"one of {one_of(divisors(size))}" if len(above_one) == 1 else "degrees of which it is a multiple"
    raise UserError(f"{said} = {numbers}: {size} processes do not divide by {product}; choose {what}")


def divisors(n: int) -> list[int]:
    """Every number that divides n."""
    return [d for d in range(1, n + 1) if n % d == 0]


def one_of(values: list[int]) -> str:
    """The values in words, for a sentence."""
    return ", ".join(map(str, values))
