"""The exponential moving average of the weights (EMA), over this rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longtake.chunks import chunked
from longtake.train.config import RunConfig
from longtake.train.optimizer.sharded import sharded_like, sharing
from longtake.train.optimizer.storage import CHUNK_BYTES, OnDevice, OnHost


class Ema:
    """Exponential moving average of the trained weights in float32: `ema += (1 - d) * (weights - ema)`.

    The decay d at step n is `min(limit, (1 + n) / (10 + n))`, so that the start of a run is soon forgotten; without
    `ramp` it is `limit` from the first step on, as in Open-Sora 2.0. With `offload` it lives in the host's memory and
    passes through the device.
    """

    def __init__(self, model: nn.Module, limit: float, ramp: bool = True, offload: bool = False) -> None:
        self.limit, self.ramp = limit, ramp
        self.parameters: Mapping[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        current = sharing(self.parameters)
        layouts = [{"average": (tuple(x.shape), torch.float32)} for x in current]
        self.storage = (OnHost if offload else OnDevice)(layouts, current[0].device)
        self.restart()

    @classmethod
    def of_run(cls, model: nn.Module, config: RunConfig) -> Ema | None:
        """Create the EMA of a run's config; None where it has none."""
        if config.ema_decay is None:
            return None
        return cls(model, config.ema_decay, ramp="ema_without_ramp" not in config.quirks, offload=config.ema_offload)

    @property
    def averages(self) -> dict[str, Tensor]:
        """This rank's shard of each average: float32, by the parameter's name."""
        self.storage.wait()
        return {name: own["average"] for name, own in zip(self.parameters, self.storage.tensors, strict=True)}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor | None = None) -> None:
        """Take in the weights after step number `step` (from 1), unless the 0-d tensor `skip` is 1."""
        decay = min(self.limit, (1 + step) / (10 + step)) if self.ramp else self.limit
        current = sharing(self.parameters)
        weight = None if skip is None else (1 - decay) * (1 - skip.to(current[0].device))
        for indices, tensors in self.storage.walk():
            averages, weights = [own["average"] for own in tensors], [current[i] for i in indices]
            if any(x.dtype != torch.float32 for x in weights):  # one at a time: no copy of the whole model in float32
                for average, x in zip(averages, weights, strict=True):
                    average.lerp_(x.float(), 1 - decay if weight is None else weight)
                continue
            for few in chunked([x.nbytes for x in weights], CHUNK_BYTES):  # what is made of them is as large
                own, now = averages[few.start : few.stop], weights[few.start : few.stop]
                change = torch._foreach_sub(now, own)  # `_foreach_lerp_` takes no one weight for all on a device
                torch._foreach_mul_(change, 1 - decay if weight is None else weight)
                torch._foreach_add_(own, change)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Set the weights to the EMA inside the context, and restore them after it, bit by bit, from a copy in host
        memory."""
        current = sharing(self.parameters)
        kept = [x.detach().to("cpu", copy=True) for x in current]
        with torch.no_grad():
            for average, x in zip(self.averages.values(), current, strict=True):
                x.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for x, before in zip(current, kept, strict=True):
                    x.copy_(before)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the EMA from the current weights."""
        for average, x in zip(self.averages.values(), sharing(self.parameters), strict=True):
            average.copy_(x)

    def state(self) -> dict[str, Tensor]:
        """Return the averages under names for a checkpoint; sharded like their parameters, sharing memory."""
        return {f"ema.{name}": sharded_like(own, self.parameters[name]) for name, own in self.averages.items()}
