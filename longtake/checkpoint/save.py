"""Write a checkpoint: a safetensors shard of each rank, run.json, then COMPLETE.

`save_checkpoint` has three stages, each agreed on by all ranks: `open_partial` (rank 0 makes the working folder), the
shards (each rank its own files) and the completion (rank 0 writes run.json and COMPLETE and renames). `background`
goes through the same stages while training continues.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from longtake.checkpoint import writer
from longtake.checkpoint.folder import FORMAT_VERSION, PARTIAL_SUFFIX, checkpoint_path, is_complete
from longtake.checkpoint.layout import ShardFile, lay_out, local_part
from longtake.checkpoint.runs import set_aside, sweep
from longtake.contracts import UserError
from longtake.durable import DISK_FULL
from longtake.parallel.world import World
from longtake.tensor_files import bytes_of


def save_checkpoint(
    run_folder: str | Path, epoch: int, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Path:
    """Write `run_folder/epoch{E}-global_step{N}` and return its path. Collective: every rank calls it.

    `tensors`: names such as `model.<param>`, `ema.<param>`, `optim.<param>.exp_avg`; the part before the first dot
    groups them into files. Plain tensors are taken as equal on all ranks and written once; of a DTensor each rank
    writes its shard. Any device, any dtype that safetensors knows. The names must be the same on all ranks.
    `state`: all that is not a tensor, as JSON types with string keys; rank 0's counts.

    Raises UserError on every rank, after removing the half-written folder, where that checkpoint exists already or
    the disk is full or not writable.
    """
    return save_into(checkpoint_path(run_folder, epoch, step), epoch, step, tensors, state)


def save_into(target: Path, epoch: int, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """`save_checkpoint` into a folder of another name."""
    assert tensors, "a checkpoint without tensors"
    world = World.here()
    partial = world.on_main(lambda: open_partial(target))
    try:
        files = lay_out(tensors)
        shares = world.gather(world.on_all(lambda: _write_shards(partial, files, tensors)))
        records = {name: record for own in shares for name, record in own.items()}
        assert records, "no shard was written"
        content, facts = state_bytes(state), marker_facts(epoch, step)
        world.on_main(lambda: writer.commit(partial, target, content, facts, records))
    except Exception as error:
        discard(partial)  # no rank is writing any more: each stage ends together, with or without an error
        if isinstance(error, OSError):
            raise UserError(write_error_sentence(target, size_of(tensors), error)) from error
        raise
    return target


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return the content of run.json."""
    return json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1).encode()


def marker_facts(epoch: int, step: int) -> dict[str, int]:
    """What COMPLETE says beside its time and its files."""
    return {"format_version": FORMAT_VERSION, "epoch": epoch, "step": step, "world_size": World.here().size}


def discard(partial: Path) -> None:
    """Remove a working folder, on rank 0."""
    if World.here().is_main:
        shutil.rmtree(partial, ignore_errors=True)


def open_partial(target: Path) -> Path:
    """Make the empty working folder `<target>.partial`; sweep away what was cut off beside it."""
    if is_complete(target):
        raise UserError(f"{target}: is a complete checkpoint already and is not overwritten; move it away or resume it")
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        if target.exists():
            set_aside(target)
        partial.mkdir()
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: cannot be made ({error.strerror}); give a writable outputs folder"
        ) from error
    return partial


def _write_shards(
    partial: Path, files: tuple[ShardFile, ...], tensors: Mapping[str, Tensor]
) -> dict[str, writer.Record]:
    """Write and fsync this rank's files, one tensor at a time in memory; what COMPLETE says of them."""

    def pieces(file: ShardFile) -> Iterator[memoryview]:
        for piece in file.pieces:
            yield memoryview(bytes_of(local_part(tensors[piece.name]).cpu()).numpy())

    return {file.name: writer.write_shard(partial / file.name, file.header, pieces(file)) for file in files}


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of whole tensors, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_error_sentence(target: Path, num_bytes: int, error: OSError) -> str:
    """What the user reads when the disk refused."""
    if error.errno in DISK_FULL:
        needed = num_bytes / 2**30
        return (
            f"{target}: the disk is full ({error.strerror}), the checkpoint needs {needed:.3g} GiB; the half-written "
            "folder was removed and earlier checkpoints are untouched: make room, or lower keep_n_latest, and resume"
        )
    return f"{target}: cannot be written ({error.strerror or error}); the half-written folder was removed"
