"""Which rank writes which part of which tensor into which file; collective, and the same at every save of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from longtake.checkpoint.folder import SHARD_SUFFIX
from longtake.parallel import World

SHARD_BYTES = 512 << 20  # of one file; a reader maps whole files
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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


def signature(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    """What the layout depends on; as long as it is the same on all ranks, so is the layout."""
    return tuple((name, tuple(t.shape), t.dtype, _placed(t)) for name, t in tensors.items())


def _placed(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def lay_out(tensors: Mapping[str, Tensor], limit_bytes: int = SHARD_BYTES) -> tuple[ShardFile, ...]:
    """The files of this rank. Collective: PyTorch's planner on rank 0 decides which rank writes what several hold."""
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
    """This rank's shard of a DTensor; a plain tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [num_bytes], in row-major order; shares memory where it can."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _plan(tensors: dict[str, Tensor]) -> SavePlan:
    world = World.here()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=world.is_main)
    mine = world.on_all(planner.create_local_plan)
    if world.size == 1:
        return planner.create_global_plan([mine])[0][0]
    gathered: list[SavePlan | None] | None = [None] * world.size if world.is_main else None
    dist.gather_object(mine, gathered, dst=0)
    box: list[object] = [None]
    plans: list[object] = [None] * world.size
    if world.is_main:
        try:
            plans = list(planner.create_global_plan(gathered)[0])
        except Exception as error:  # a name that ranks have in different shapes
            plans = [ValueError(f"the ranks hold tensors that do not go together ({error})")] * world.size
    dist.scatter_object_list(box, plans if world.is_main else None, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    assert isinstance(box[0], SavePlan)
    return box[0]


def deal_into_files(pieces: list[Piece], limit_bytes: int) -> list[list[Piece]]:
    """The pieces of each file, by name: one part (`model`, `ema` …) a file, a new one where it gets too large."""
    files: list[list[Piece]] = []
    filled, part = 0, None
    for piece in sorted(pieces, key=lambda piece: piece.name):
        own = piece.name.split(".")[0]
        if own != part or filled + piece.num_bytes > limit_bytes:
            files.append([])
            filled, part = 0, own
        files[-1].append(piece)
        filled += piece.num_bytes
    for file in files:
        file.sort(key=lambda piece: (-piece.dtype.itemsize, piece.name))  # aligned without holes
    return files


def _header(pieces: list[Piece]) -> bytes:
    """The head of a file, with the places of the pieces as PyTorch's Hugging Face storage writes them."""
    places = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}
    facts = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    return safetensors_head([(piece.name, piece.dtype, piece.sizes) for piece in pieces], facts)


def safetensors_head(rows: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON padded with blanks to a multiple of 8.

    `rows`: name, dtype and shape of each tensor, in the order of their bytes. Raises TypeError for other dtypes.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in rows:
        if dtype not in SAFETENSORS_DTYPES:
            raise TypeError(f"{name}: {dtype} has no place in a safetensors file")
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
