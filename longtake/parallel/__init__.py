"""Everything about more than one process: the world, the mesh, and how a model is cut over it."""

from longtake.parallel.host import tune_host
from longtake.parallel.mesh import Mesh, ParallelConfig, TokenPeers, resolve_degrees
from longtake.parallel.shard import (
    cut_model,
    initialise_sharded,
    local_tensor,
    offloads,
    own_part,
    remat_blocks,
    shard_model,
)
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World, start_world

__all__ = [
    "Mesh",
    "ParallelConfig",
    "TokenCut",
    "TokenPeers",
    "World",
    "cut_model",
    "initialise_sharded",
    "local_tensor",
    "offloads",
    "own_part",
    "remat_blocks",
    "resolve_degrees",
    "shard_model",
    "start_world",
    "tune_host",
]
