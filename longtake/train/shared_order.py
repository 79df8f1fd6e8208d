"""The order of a pass, computed once on each machine and shared by its ranks."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from longtake import locks
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.kept_orders import plan_kept
from longtake.buckets.order import PassOrder, open_order, order_summary, write_order
from longtake.parallel.world import World

_PREFIX = "longtake-order-"
_LOCK = "planner.lock"  # held by the planning process as long as it lives
_SETTLED_SECONDS = 60.0  # a younger one may be about to take its lock


def plan_shared(
    inputs: OrderInputs,
    pass_index: int,
    state: dict | None,
    world: World,
    table: Path | None = None,
    say: Callable[[str], None] = print,
) -> PassOrder:
    """`plan_kept` by one rank of each machine; the others read its arrays through memory maps.

    The files lie in the temporary folder (`TMPDIR`) only until every rank has opened them; what a killed
    process left there is removed by the next one. Any error of one rank, a full disk too, is raised on all.
    """
    if world.size == 1:
        return plan_kept(inputs, pass_index, state, table, say)
    folder = Path(tempfile.gettempdir()) / world.broadcast(f"{_PREFIX}{secrets.token_hex(8)}")
    lock: IO[str] | None = None

    def plan() -> dict[str, Any] | None:
        nonlocal lock
        if world.local_rank:
            return None
        try:
            folder.mkdir()
        except FileExistsError:  # several ranks of a machine count as its first, or machines share the folder
            return None
        lock = open(folder / _LOCK, "w")  # noqa: SIM115 - held until all ranks have opened the files
        locks.flock(lock, locks.LOCK_EX)
        _remove_leftovers(folder.parent)
        order = plan_kept(inputs, pass_index, state, table, say)
        write_order(order, folder)
        return order_summary(order)

    try:
        summaries = world.gather(world.on_all(plan))
        summary = next(found for found in summaries if found is not None)
        return world.on_all(lambda: open_order(inputs, summary, folder))
    finally:
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()


def _remove_leftovers(temporary: Path) -> None:
    """Remove the folders of planners that were killed: nobody holds their lock any more."""
    for path in temporary.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), open(path, "r+") as lock:  # an error: a living planner holds it, or another user's
            locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
            if time.time() - path.stat().st_mtime > _SETTLED_SECONDS:
                shutil.rmtree(path.parent, ignore_errors=True)
