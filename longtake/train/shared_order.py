"""The order of a pass, computed once on each machine and shared by its ranks."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from longtake.buckets import OrderInputs, PassOrder, open_order, order_summary, plan_pass, write_order
from longtake.parallel import World


def plan_shared(inputs: OrderInputs, pass_index: int, state: dict | None, world: World) -> PassOrder:
    """`plan_pass` by one rank of each machine; the others read its arrays through memory maps.

    The files lie in the temporary folder (`TMPDIR`) only until every rank has opened them. Any error of one rank, a
    full disk too, is raised on all.
    """
    if world.size == 1:
        return plan_pass(inputs, pass_index, state)
    folder = Path(tempfile.gettempdir()) / world.broadcast(f"longtake-order-{secrets.token_hex(8)}")
    planned = False

    def plan() -> dict[str, Any] | None:
        nonlocal planned
        if world.local_rank:
            return None
        try:
            folder.mkdir()
        except FileExistsError:  # several ranks of a machine count as its first, or machines share the folder
            return None
        planned = True
        order = plan_pass(inputs, pass_index, state)
        write_order(order, folder)
        return order_summary(order)

    try:
        summaries = world.gather(world.on_all(plan))
        summary = next(found for found in summaries if found is not None)
        return world.on_all(lambda: open_order(inputs, summary, folder))
    finally:
        if planned:
            shutil.rmtree(folder, ignore_errors=True)
