"""Weight update after the last backward of a step: clipping, AdamW, the EMA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from longtake.train.config import RunConfig
from longtake.train.optimizer.config import ClipConfig
from longtake.train.optimizer.ema import Ema
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale


class WeightUpdate:
    """The update of a run's weights, and every tensor of it that a checkpoint holds."""

    def __init__(self, model: nn.Module, config: RunConfig, prefix: str = "") -> None:
        """`prefix`: before the names in a checkpoint, of a second denoiser."""
        self.optimizer, self.ema, self.prefix = ShardedAdamW(model, config), Ema.of_run(model, config), prefix
        self._limit, self._law = config.grad_clip, config.optim.clip

    def __call__(self, step: int, rates: float | Mapping[str, float], square: Tensor, skip: Tensor | None) -> None:
        """Make step number `step` (from 1); `square`: of the gradient's norm over all ranks; rates and `skip` as
        `ShardedAdamW.step` takes them."""
        norm = square.sqrt()
        scale = clip_scale(norm, limit_at(self._law, self._limit, step, norm)) if self._limit else None
        scale, skip = self._near_masters(scale, skip)
        self.optimizer.step(rates, scale, skip)
        if self.ema is not None:
            self.ema.update(step, skip)

    def _near_masters(self, *numbers: Tensor | None) -> list[Tensor | None]:
        """Return the 0-d tensors on the masters' device. With `parallel.cpu_offload` one copy takes all of them to
        the host, which waits for it: the update is made there."""
        known = [number.float() for number in numbers if number is not None]
        if not known or known[0].device.type == self.optimizer.device.type:
            return list(numbers)
        copied = iter(torch.stack(known).to(self.optimizer.device))
        return [None if number is None else next(copied) for number in numbers]

    def at_rate_zero(self) -> None:
        """Do the same work with the weights left as they are, for measuring on one rank."""
        self(1, 0.0, self.optimizer.grad_square_sum(), None)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights and the optimizer's state by their names in a checkpoint, sharded,
        sharing memory."""
        weights = {f"model.{name}": p.data for name, p in self.optimizer.parameters.items()}
        return self._named(weights | self.optimizer.state())

    def averages(self) -> dict[str, Tensor]:
        """Return the EMA by its names in a checkpoint; nothing where the run keeps none."""
        return {} if self.ema is None else self._named(self.ema.state())

    def tensors(self) -> dict[str, Tensor]:
        """Return both of these."""
        return self.weights() | self.averages()

    def _named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.prefix + name: tensor for name, tensor in tensors.items()}


def limit_at(law: ClipConfig | None, limit: float, step: int, norm: Tensor) -> float | Tensor:
    """Return the limit on the gradient's norm at step number `step` (from 1), of a run whose limit is `limit` in the
    end; as a tensor, without a wait for the device, where it depends on the norm."""
    if law is None:
        return limit
    if step <= law.steps + 1:
        return limit * (law.start + (1 - law.start) * (step - 1) / max(1, law.steps))
    ratio = norm / limit
    divided = limit / torch.nan_to_num(ratio).clamp(max=law.most)
    return torch.where(ratio > law.abnormal, divided, torch.full_like(norm, limit))
