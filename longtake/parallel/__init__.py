"""Everything about more than one process: the world, the mesh, and how a model is cut over it."""

from longtake.parallel.host import tune_host
from longtake.parallel.mesh import Mesh, ParallelConfig
from longtake.parallel.shard import initialise_sharded, local_tensor, own_part, remat_blocks, shard_model
from longtake.parallel.world import World, start_world

__all__ = [
    "Mesh",
    "ParallelConfig",
    "World",
    "initialise_sharded",
    "local_tensor",
    "own_part",
    "remat_blocks",
    "shard_model",
    "start_world",
    "tune_host",
]
