"""One decode for all ranks that hold parts of the same micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from longtake.data import Parcel
from longtake.parallel import Neighbourhood


def share_parcel(
    parcel: Parcel | None, loaded: int, reader: int, groups: Neighbourhood, device: torch.device
) -> tuple[Parcel, int]:
    """The parcel of one rank of the groups, with the number of its samples that train, on all of their ranks.

    Collective. Rank `reader` of the groups gives it, on `device`; the others give None and 0. Two messages: the plan
    over the CPU, so that no device is waited for, and the bytes of all tensors together.
    """
    assert groups.talk is not None
    source = dist.get_global_rank(groups.talk, reader)
    assert (dist.get_rank(groups.talk) == reader) == (parcel is not None)
    box: list[Any] = [(parcel.plan, len(parcel.data), loaded) if parcel is not None else None]
    dist.broadcast_object_list(box, src=source, group=groups.talk, device=torch.device("cpu"))
    plan, num_bytes, loaded = box[0]
    data = parcel.data if parcel is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=source, group=groups.data)
    return Parcel(plan, data), loaded
