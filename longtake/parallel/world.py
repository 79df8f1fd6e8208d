"""The processes of a run: how they are joined and left, and collectives on plain objects."""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longtake.contracts import UserError
from longtake.parallel.rendezvous import is_torchrun, join, launched_as

T = TypeVar("T")
_GLOO_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
LOST_PEER = "the connection to another process of the run is lost"
_LAST_HOST_SECONDS = 1.0  # torchrun looks at its processes ten times a second
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_HOOK = "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"  # PyTorch reads it under both names
_REGISTERS = (f"TORCH_{_HOOK}", _HOOK, "NCCL_LOCAL_REGISTER")
_OFF = ("", "0", "false", "f", "n", "no")


@dataclass(frozen=True)
class World:
    """This process's rank among the processes of the run, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int | None = None  # processes on this node; None where unknown

    @classmethod
    def here(cls) -> World:
        """Return the world of the default process group, for code that is not passed one; a single process without a
        group."""
        if not dist.is_initialized():
            return cls(0, 1, 0, torch.device("cpu"))
        return cls(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))

    @property
    def node_size(self) -> int:
        """Processes on this node; all of them where nodes are unknown."""
        return self.local_size or self.size

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

    def on_main(self, action: Callable[[], T]) -> T:
        """Rank 0's result of `action` (a small plain object), on every rank.

        What `action` raises is raised on every rank, so that none is left waiting.
        """
        result, error = _attempt(action) if self.is_main else (None, None)
        received = self.broadcast((result, _portable(error)))
        if not self.is_main:
            result, error = received
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return this rank's result; the error of the lowest rank is raised on all."""
        result, error = _attempt(action)
        errors = self.gather(_portable(error))
        errors[self.rank] = error  # the original keeps its traceback
        for found in errors:
            if found is not None:
                raise found
        return result  # type: ignore[return-value]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (a small plain object), on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def free_memory(self) -> None:
        """Free the device memory of deleted models, which hold reference cycles."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """Return the error in a form that can be pickled."""
    if isinstance(error, UserError):
        return UserError(str(error))
    return error if error is None or isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")


@contextmanager
def start_world(device: str = "auto", timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Join the processes that torchrun or the user started, or make a world of one without network; leave it at the
    end.

    `device`: "auto" (CUDA where there is one), "cuda" or "cpu". Backend nccl on CUDA, gloo on the CPU.
    Raises `UserError` where CUDA is asked for and there is none, or less than one device for each process, and as
    `rendezvous.join` does.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError('device = "cuda": PyTorch finds no CUDA device here; choose "cpu" or "auto"')
    use_cuda = has_cuda and device != "cpu"
    rank, size, local_rank, local_size = 0, 1, 0, None
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_seconds)}
    if (launched := launched_as(os.environ)) is not None:
        rank, size = launched
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--nproc_per_node: process {local_rank} finds only {torch.cuda.device_count()} CUDA devices on this node; "
            "start one process for each device"
        )
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        if settings := allocator_settings(os.environ):
            torch._C._accelerator_setAllocatorSettings(settings)
        torch.cuda.set_device(place)
        if size > 1:  # NCCL connects at once; a single process needs no connection
            options["device_id"] = place
    if size == 1:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif not is_torchrun(os.environ):
        options |= {"store": join(rank, size, options["timeout"], os.environ), "rank": rank, "world_size": size}
    elif restart := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        options |= _store_of_restart(restart, options["timeout"])
    dist.init_process_group("nccl" if use_cuda else "gloo", **options)
    try:
        yield World(rank, size, local_rank, place, local_size)
        if size > 1:
            dist.barrier()  # leave together: a peer that is gone already can bring this process down at its exit
    except RuntimeError as error:
        if size == 1 or not any(words in str(error) for words in _GLOO_LOST_PEER):
            raise
        raise UserError(
            f"rank {rank}: {LOST_PEER}, which ended first; see its messages, mend the cause, and start again"
        ) from error
    finally:
        dist.destroy_process_group()
    _outlast_other_hosts()


def allocator_settings(environment: Mapping[str, str]) -> str | None:
    """Return the settings of PyTorch's allocator before the first allocation: expandable segments, so that buckets of
    many sizes leave no holes. None where the user has custom settings, or NCCL registers buffers, which must not
    grow."""
    own = any(name in environment for name in _ALLOCATOR)
    registered = any(environment.get(name, "0").lower() not in _OFF for name in _REGISTERS)
    return None if own or registered else "expandable_segments:True"


def _outlast_other_hosts() -> None:
    """Keep the processes of the first host alive a little longer than those of the others.

    torchrun there holds the store in which all hosts rendezvous at the end. If it exits before another host has its
    answer, that one prints a traceback of 30 lines over a successful run.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and os.environ.get("GROUP_RANK") == "0":
        time.sleep(_LAST_HOST_SECONDS)


def _store_of_restart(restart: int, timeout: datetime.timedelta) -> dict[str, Any]:
    """Return a namespace in torchrun's store for each restart of the processes.

    With a static rendezvous (`--master_addr`) the store outlives the processes, so restarted ones would find stale
    addresses.
    """
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    return {"store": dist.PrefixStore(f"restart{restart}", store), "rank": rank, "world_size": size}
