"""Write a checkpoint: shards by PyTorch's distributed checkpoint in safetensors files, run.json, then COMPLETE.

`save_checkpoint` has three stages, each agreed on by all ranks: `_open_partial` (rank 0 makes the working folder),
`_write_shards` (each rank its own files) and `_commit` (rank 0 writes run.json and COMPLETE and renames). An
asynchronous save copies the tensors first and runs the same three stages in a thread.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from longtake.checkpoint.agree import gather, on_every_rank, on_first_rank, rank_and_world
from longtake.checkpoint.folder import (
    FORMAT_VERSION,
    PARTIAL_SUFFIX,
    SHARD_SUFFIX,
    STATE_FILE,
    FileRecord,
    Marker,
    checkpoint_path,
    is_complete,
    now,
    record_of,
    write_marker,
)
from longtake.contracts import UserError
from longtake.durable import sync_folder, write_whole

SHARD_BYTES = 512 << 20  # safetensors makes each file twice in memory before it is written: this bounds those copies
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    run_folder: str | Path, epoch: int, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Path:
    """Write `run_folder/epoch{E}-global_step{N}` and return its path. Collective: every rank calls it.

    `tensors`: names such as `model.<param>`, `ema.<param>`, `optim.<param>.exp_avg`; the part before the first dot
    groups them into files. Plain tensors are taken as equal on all ranks and written once; of a DTensor each rank
    writes its shard. Any device, any dtype that safetensors knows. The names must be the same on all ranks.
    `state`: all that is not a tensor, as JSON types with string keys; rank 0's counts.

    Raises UserError on every rank, after removing the half-written folder, where that checkpoint exists already or
    the disk is full or not writable; TypeError where `state` would not come back from JSON as it is.
    """
    assert tensors, "a checkpoint without tensors"
    target = checkpoint_path(run_folder, epoch, step)
    partial = on_first_rank(lambda: _open_partial(target, state))
    rank, world = rank_and_world()
    try:
        _write_shards(partial, tensors)
        shards = gather(on_every_rank(lambda: _own_shards(partial, rank)))
        files = {name: record for own in shards for name, record in own.items()}
        on_first_rank(lambda: _commit(partial, target, Marker(FORMAT_VERSION, epoch, step, world, now(), files), state))
    except Exception as error:
        if rank == 0:  # no rank is writing any more: each stage ends together, with or without an error
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(_write_error_sentence(target, tensors, error)) from error
        raise
    return target


def _open_partial(target: Path, state: Mapping[str, Any]) -> Path:
    """Make the empty working folder `<target>.partial`; remove what killed saves and removals left beside it."""
    _check_json(state, "state")
    if is_complete(target):
        raise UserError(f"{target}: is a complete checkpoint already and is not overwritten; move it away or resume it")
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        shutil.rmtree(target, ignore_errors=True)  # incomplete, as was just seen
        partial.mkdir()
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: cannot be made ({error.strerror}); give a writable outputs folder"
        ) from error
    return partial


def remove_leftovers(run_folder: Path) -> None:
    """Remove the `.partial` folders of earlier, killed processes. Only the run that owns the folder may call this."""
    for leftover in run_folder.glob(f"epoch*-global_step*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Each rank writes and fsyncs its files. An error of any rank is raised on all of them."""
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_deal_into_files(tensors), save_distributed=True
    )
    _, world = rank_and_world()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(tensors), storage_writer=writer, planner=_SeparatePlanner(), no_dist=world == 1)
    except CheckpointException as error:
        raise first_cause(error) from error


class _SeparatePlanner(DefaultSavePlanner):
    """Gives safetensors what it insists on: contiguous tensors, no two of which share memory (tied weights do)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._storages: set[int] = set()

    def transform_object(self, write_item: Any, object: Any) -> Any:
        tensor = object.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages:
            return tensor.clone()
        self._storages.add(storage)
        return tensor


def _deal_into_files(tensors: Mapping[str, Tensor], limit_bytes: int = SHARD_BYTES) -> dict[str, int]:
    """Which of a rank's files, from 1, each name goes to: one part per file, a new file before it grows past the limit.

    Sizes are those of this rank's shards; only rank 0's answer is used, for all ranks.
    """
    files: dict[str, int] = {}
    index, filled, part = 0, 0, None
    for name in sorted(tensors):
        tensor = tensors[name]
        size = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        if name.split(".")[0] != part or filled + size > limit_bytes:
            index, filled, part = index + 1, 0, name.split(".")[0]
        filled += size
        files[name] = index
    return files


def _own_shards(folder: Path, rank: int) -> dict[str, FileRecord]:
    """Size and checksum of the files that this rank has just written (DCP numbers shards by rank, from 1)."""
    return {path.name: record_of(path) for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*{SHARD_SUFFIX}"))}


def _commit(partial: Path, target: Path, marker: Marker, state: Mapping[str, Any]) -> None:
    """Rank 0: run.json, COMPLETE, then the folder takes its name."""
    assert any(name.endswith(SHARD_SUFFIX) for name in marker.files), "no shard was found after writing"
    content = {"format_version": FORMAT_VERSION, **state}
    write_whole(partial / STATE_FILE, json.dumps(content, indent=1).encode())
    files = {**marker.files, STATE_FILE: record_of(partial / STATE_FILE)}
    fields = {name: getattr(marker, name) for name in ("format_version", "epoch", "step", "world_size", "saved_at")}
    write_marker(partial, Marker(**fields, files=files))
    os.replace(partial, target)
    sync_folder(target.parent)


def first_cause(error: CheckpointException) -> BaseException:
    """The lowest rank's own error inside DCP's collection; a Ctrl-C on any rank comes first."""
    causes = [error.failures[rank][0] for rank in sorted(error.failures)]
    return next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), causes[0])


def _check_json(value: Any, place: str) -> None:
    """Raise TypeError for what JSON would change in silence (keys that are not strings) or cannot write."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: key {key!r} is not a string; JSON would turn it into one")
            _check_json(item, f"{place}.{key}")
        if place == "state" and "format_version" in value:
            raise TypeError("state.format_version: is written by save_checkpoint itself; leave it out")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{place}[{index}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise TypeError(f"{place}: {type(value).__name__} cannot be written as JSON; give plain numbers and strings")


def _write_error_sentence(target: Path, tensors: Mapping[str, Tensor], error: OSError) -> str:
    if error.errno in _DISK_FULL:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 2**30
        return (
            f"{target}: the disk is full ({error.strerror}), the checkpoint needs {needed:.3g} GiB; the half-written "
            "folder was removed and earlier checkpoints are untouched: make room, or lower keep_n_latest, and resume"
        )
    return f"{target}: cannot be written ({error.strerror or error}); the half-written folder was removed"
