"""Parallelism: the processes of a run, the mesh, sharding, sequence and tensor parallelism, recomputation."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.parallel.collectives import all_gather_single, reduce_scatter_single
    from longtake.parallel.compile import (
        BlockCompiler,
        compile_layers,
        missing_compiler,
        prepare_compiler,
        recompute_and_compile,
        use_compile_cache,
    )
    from longtake.parallel.config import ParallelConfig, resolve_degrees
    from longtake.parallel.degrees import BucketPeers, EntryKey, Subgroup, bucket_degrees, check_bucket_sequence
    from longtake.parallel.frozen import (
        HostWeights,
        SynchronisedCalls,
        fill_frozen,
        frozen_bytes,
        frozen_mesh,
        shard_frozen,
    )
    from longtake.parallel.host import CopyStreams, host_memory, pin, pinned_like, tune_host, unpin
    from longtake.parallel.mesh import Mesh, TokenPeers
    from longtake.parallel.offload import BlockStore
    from longtake.parallel.offloaded_weights import OffloadedTensors, OffloadedWeights, offloaded
    from longtake.parallel.recomputation import (
        NAMED_LEVELS,
        CurrentLevel,
        Level,
        Saved,
        check_level,
        counts_setting,
        level_and_counts,
        level_setting,
        level_text,
        levels_text,
        saved_as,
        saved_by_list,
    )
    from longtake.parallel.shard import (
        cut_among,
        cut_model,
        gather_anew,
        initialise_sharded,
        local_tensor,
        offloads,
        own_part,
        shard_model,
    )
    from longtake.parallel.shared_work import RowShare, Tile, TileShare, deal
    from longtake.parallel.tokens import TokenCut
    from longtake.parallel.world import World, start_world

__getattr__ = lazy_exports(__name__)
