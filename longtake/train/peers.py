"""One decode for all ranks that hold parts of the same micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from longtake.data import Parcel


def share_parcel(
    parcel: Parcel | None, loaded: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Parcel, int]:
    """The parcel of the group's first rank, with the number of its samples that train, on every rank of the group.

    Collective. The first rank gives it, on `device`; the others give None and 0. Two messages: the plan, and the bytes
    of all tensors together.
    """
    source = dist.get_global_rank(group, 0)
    first = dist.get_rank(group) == 0
    assert first == (parcel is not None)
    box: list[Any] = [(parcel.plan, len(parcel.data), loaded) if parcel is not None else None]
    dist.broadcast_object_list(box, src=source, group=group, device=device)
    plan, num_bytes, loaded = box[0]
    data = parcel.data if parcel is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=source, group=group)
    return Parcel(plan, data), loaded
