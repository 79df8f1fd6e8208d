"""The processes of a run: joining them, leaving them, and the few collectives that are not about tensors of the model."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longtake.contracts import UserError


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of the run, and the device it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0 writes run files, logs and prints."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (a small plain object), on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (a small plain object), on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def start_world(device: str = "auto", timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Joins the processes that `torchrun` started, or makes a world of one; leaves it at the end.

    `device`: "auto" (CUDA where there is one), "cuda" or "cpu". Backend nccl on CUDA, gloo on the CPU.
    Raises `UserError` where CUDA is asked for and there is none.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f'device = {device!r}: not a device Longtake runs on; choose "auto", "cuda" or "cpu"')
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError('device = "cuda": PyTorch finds no CUDA device here; choose "cpu" or "auto"')
    use_cuda = has_cuda and device != "cpu"
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_seconds)}
    if "MASTER_ADDR" not in os.environ:  # not under torchrun: one process, no network
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        rank, size = 0, 1
    if use_cuda:
        options["device_id"] = place
    dist.init_process_group("nccl" if use_cuda else "gloo", **options)
    try:
        yield World(rank, size, local_rank, place)
    finally:
        dist.destroy_process_group()
