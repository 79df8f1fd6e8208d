"""Everything about more than one process: the world, the mesh, and how a model is cut over it."""

from longtake.parallel.compile import BlockCompiler, check_compiler, use_compile_cache
from longtake.parallel.degrees import (
    BucketPeers,
    Entry,
    Neighbourhood,
    bucket_degrees,
    check_bucket_sequence,
    entry_degrees,
)
from longtake.parallel.frozen import HostWeights, Turns, fill_frozen, frozen_bytes, frozen_mesh, shard_frozen
from longtake.parallel.host import pin, tune_host, unpin
from longtake.parallel.mesh import Mesh, ParallelConfig, TokenPeers, resolve_degrees, ulysses_degree
from longtake.parallel.offload import InputStore
from longtake.parallel.pieces import PieceShare, RowShare, deal
from longtake.parallel.remat import Kept, check_budget, choose_kept, offload_inputs, remat_blocks
from longtake.parallel.shard import (
    cut_model,
    initialise_sharded,
    local_tensor,
    offloads,
    own_part,
    shard_model,
)
from longtake.parallel.tokens import TokenCut
from longtake.parallel.visit import VisitingWeights
from longtake.parallel.world import World, start_world

__all__ = [
    "BlockCompiler",
    "BucketPeers",
    "Entry",
    "HostWeights",
    "InputStore",
    "Kept",
    "Mesh",
    "Neighbourhood",
    "ParallelConfig",
    "PieceShare",
    "RowShare",
    "TokenCut",
    "TokenPeers",
    "Turns",
    "VisitingWeights",
    "World",
    "bucket_degrees",
    "check_bucket_sequence",
    "check_budget",
    "check_compiler",
    "choose_kept",
    "cut_model",
    "deal",
    "entry_degrees",
    "fill_frozen",
    "frozen_bytes",
    "frozen_mesh",
    "initialise_sharded",
    "local_tensor",
    "offload_inputs",
    "offloads",
    "own_part",
    "pin",
    "remat_blocks",
    "resolve_degrees",
    "shard_frozen",
    "shard_model",
    "start_world",
    "tune_host",
    "ulysses_degree",
    "unpin",
    "use_compile_cache",
]
