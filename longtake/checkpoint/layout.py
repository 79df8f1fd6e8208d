"""Which rank writes which part of which tensor into which file; collective, and the same at every save of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from longtake.checkpoint.folder import SHARD_SUFFIX
from longtake.chunks import chunked
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World
from longtake.tensor_files import safetensors_head

SHARD_BYTES = 512 << 20  # of one file; a reader maps whole files


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that this rank writes."""

    name: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file of this rank."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]  # in the order of their bytes
    start: int  # where its bytes begin among those of all files of the rank

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, the head left out."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def request(self) -> dict[str, Any]:
        """As plain data for `writer`."""
        header = self.header.decode("latin-1")
        return {"name": self.name, "header": header, "start": self.start, "num_bytes": self.num_bytes}


def signature(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    """What the layout depends on; as long as it is the same on all ranks, so is the layout."""
    return tuple((name, tuple(t.shape), t.dtype, _placed(t)) for name, t in tensors.items())


def _placed(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def lay_out(tensors: Mapping[str, Tensor], limit_bytes: int = SHARD_BYTES) -> tuple[ShardFile, ...]:
    """Return the files of this rank. Collective: PyTorch's planner on rank 0 decides which rank writes what several
    hold."""
    plan = _plan(dict(tensors))
    pieces = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn}: not a tensor"
        sizes = tuple(data.chunk.sizes)
        local = local_part(tensors[item.index.fqn])
        assert tuple(local.shape) == sizes, f"{item.index.fqn}: a shard in several parts"
        pieces.append(Piece(item.index.fqn, tuple(data.chunk.offsets), sizes, local.dtype))
    dealt = deal_into_files(pieces, limit_bytes)
    files, start = [], 0
    for number, inside in enumerate(dealt, 1):
        name = f"shard-{World.here().rank + 1:05d}-model-{number:05d}-of-{len(dealt):05d}{SHARD_SUFFIX}"
        files.append(ShardFile(name, _header(inside), tuple(inside), start))
        start += -(-files[-1].num_bytes // 64) * 64
    return tuple(files)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, without gradient."""
    return local_tensor(tensor.detach())


def _plan(tensors: dict[str, Tensor]) -> SavePlan:
    world = World.here()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=world.is_main)
    ranks = _DistWrapper(None, use_dist=world.size > 1, coordinator_rank=0)
    try:
        return ranks.reduce_scatter(
            "plan", planner.create_local_plan, lambda plans: planner.create_global_plan(plans)[0]
        )
    except CheckpointException as error:
        raise first_cause(error) from error


def first_cause(error: CheckpointException) -> BaseException:
    """Return the lowest rank's own error inside DCP's collection; a Ctrl-C on any rank comes first."""
    causes = [error.failures[rank][0] for rank in sorted(error.failures)]
    return next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), causes[0])


def deal_into_files(pieces: list[Piece], limit_bytes: int) -> list[list[Piece]]:
    """Return the pieces of each file, by name: one part (`model`, `ema` …) a file, a new one where it gets
    too large."""
    files: list[list[Piece]] = []
    for _, group in groupby(sorted(pieces, key=lambda piece: piece.name), lambda piece: piece.name.split(".")[0]):
        part = list(group)
        files += [part[few.start : few.stop] for few in chunked([one.num_bytes for one in part], limit_bytes)]
    for file in files:
        file.sort(key=lambda piece: (-piece.dtype.itemsize, piece.name))  # aligned without holes
    return files


def _header(pieces: list[Piece]) -> bytes:
    """Return the head of a file, with the places of the pieces as PyTorch's Hugging Face storage writes them."""
    places = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}
    facts = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    return safetensors_head([(piece.name, piece.dtype, piece.sizes) for piece in pieces], facts)
