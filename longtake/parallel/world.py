"""The processes of a run: joining them, leaving them, and the few collectives that carry no tensors of the model."""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longtake.contracts import UserError

T = TypeVar("T")
_GLOO_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
LOST_PEER = "the connection to another process of the run is lost"
_LAST_HOST_SECONDS = 1.0  # torchrun looks at its processes ten times a second
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set together by torchrun


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of the run, and the device it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int | None = None  # processes on this node; None where the launcher did not say

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

        What `action` raises is raised on every rank, so that none is left waiting for the others.
        """
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                outcome = action(), None
            except Exception as error:
                if self.size == 1:
                    raise
                outcome = None, _portable(error)
        result, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """This rank's result of `action`, which every rank runs; the error of the lowest rank is raised on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as found:
            if self.size == 1:
                raise
            error = _portable(found)
        for found in self.gather(error):
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
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def free_memory(self) -> None:
        """Gives the device back what models that nobody names any more hold: they refer to themselves in circles."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _portable(error: Exception) -> Exception:
    """The error as it can travel between processes: some classes do not survive pickling."""
    if isinstance(error, UserError):
        return UserError(str(error))
    return error if isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")


@contextmanager
def start_world(device: str = "auto", timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Joins the processes that `torchrun` started, or makes a world of one without network; leaves it at the end.

    `device`: "auto" (CUDA where there is one), "cuda" or "cpu". Backend nccl on CUDA, gloo on the CPU.
    Raises `UserError` where CUDA is asked for and there is none, or less than one device for each process.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f'device = {device!r}: not a device Longtake runs on; choose "auto", "cuda" or "cpu"')
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError('device = "cuda": PyTorch finds no CUDA device here; choose "cpu" or "auto"')
    use_cuda = has_cuda and device != "cpu"
    rank, size, local_rank, local_size = 0, 1, 0, None
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_seconds)}
    if all(name in os.environ for name in _LAUNCHED):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None
    else:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--nproc_per_node: process {local_rank} finds only {torch.cuda.device_count()} CUDA devices on this node; "
            "start one process for each device"
        )
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
        options["device_id"] = place
    if (restart := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) and size > 1:
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
            f"rank {rank}: {LOST_PEER}, because that one ended first; see what it said, mend that, and start again"
        ) from error
    finally:
        dist.destroy_process_group()
    _outlast_other_hosts()


def _outlast_other_hosts() -> None:
    """Keeps the processes of the first host for a moment longer than those of the others.

    torchrun there holds the store that the torchruns of all hosts meet in at the end. If it is not the last to come, it
    may be gone before another one has its answer, which then prints a stack of 30 lines over a run that ended well.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and os.environ.get("GROUP_RANK") == "0":
        time.sleep(_LAST_HOST_SECONDS)


def _store_of_restart(restart: int, timeout: datetime.timedelta) -> dict[str, Any]:
    """A place of its own for each start of the processes in torchrun's store.

    With a static rendezvous (`--master_addr`) the store outlives the processes, and those that come after them would
    find the addresses of the dead.
    """
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    return {"store": dist.PrefixStore(f"restart{restart}", store), "rank": rank, "world_size": size}
