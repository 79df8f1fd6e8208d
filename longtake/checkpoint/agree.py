"""Acting together, so that an error on one rank ends every rank instead of leaving the others waiting.

Without a process group each of these runs once, here. What travels between ranks is pickled by torch inside the
running job; nothing of it is read from a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """`(rank, number of ranks)` of the default process group; `(0, 1)` without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank; its error is raised on every rank."""
    rank, world = rank_and_world()
    result, error = _attempt(action) if rank == 0 else (None, None)
    if world > 1:
        box = [(result, _portable(error))]
        dist.broadcast_object_list(box, src=0)
        if rank > 0:
            result, error = box[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def on_every_rank(action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result; the lowest rank's error is raised on every rank."""
    rank, _ = rank_and_world()
    result, error = _attempt(action)
    errors = gather(_portable(error))
    errors[rank] = error  # the original keeps its traceback
    for found in errors:
        if found is not None:
            raise found
    return result  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank."""
    _, world = rank_and_world()
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """The error as it can be sent: one that does not survive pickling becomes a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
