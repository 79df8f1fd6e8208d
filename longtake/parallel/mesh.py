"""The mesh: one object that knows which rank does what. Nobody else computes ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from pydantic import Field, PositiveInt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longtake.config import Section
from longtake.contracts import UserError
from longtake.parallel.world import World


class ParallelConfig(Section):
    """How the model and the data are spread over the ranks."""

    replicate: int = Field(1, ge=1, description="groups that each hold the whole model (HSDP when above 1)")
    shard: PositiveInt | Literal["auto"] = Field("auto", description="ranks over which each group shards its weights")
    zero: Literal[2, 3] = Field(3, description="3 frees gathered weights after the forward, 2 keeps them for backward")


@dataclass(frozen=True)
class Mesh:
    """The world as axes named by use. Data is split over replicate x shard."""

    replicate: int
    shard: int
    zero: int
    data_rank: int
    weights: DeviceMesh  # the axes that weights live on: ("shard",), or ("replicate", "shard") when replicate > 1
    peers: dist.ProcessGroup | None = None  # ranks of this data rank, parts of whose micro-batches they run; None: one

    @property
    def reads(self) -> bool:
        """Whether this rank loads data; peers get theirs from it."""
        return self.peers is None or dist.get_rank(self.peers) == 0

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data; also the ranks that average the loss."""
        return self.replicate * self.shard

    @classmethod
    def create(cls, config: ParallelConfig, world: World) -> Mesh:
        """Checks the degrees against the world. Raises `UserError` listing what would fit."""
        if world.size % config.replicate:
            raise UserError(
                f"parallel.replicate = {config.replicate}: {world.size} processes do not divide by it; "
                f"choose one of {_divisors(world.size)}"
            )
        rest = world.size // config.replicate
        shard = rest if config.shard == "auto" else config.shard
        if config.replicate * shard != world.size:
            raise UserError(
                f"parallel.replicate x parallel.shard = {config.replicate} x {shard}: makes "
                f'{config.replicate * shard} ranks but {world.size} are running; choose shard = {rest} or "auto"'
            )
        device = world.device.type
        if config.replicate > 1:
            weights = init_device_mesh(device, (config.replicate, shard), mesh_dim_names=("replicate", "shard"))
        else:
            weights = init_device_mesh(device, (shard,), mesh_dim_names=("shard",))
        return cls(config.replicate, shard, config.zero, world.rank, weights)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
