"""The update of a run by itself, for a plan that measures steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from longtake.train.config import RunConfig
from longtake.train.optimizer import ShardedAdamW, clip_scale
from longtake.train.optimizer.ema import Ema


def make_update(denoiser: nn.Module, config: RunConfig) -> Callable[[], None]:
    """What follows a step's last backward: clipping, AdamW and the EMA as the run has them, at rate 0."""
    optimizer = ShardedAdamW(denoiser, config)
    ema = Ema.of_run(denoiser, config)

    def update() -> None:
        norm = optimizer.grad_square_sum().sqrt()
        optimizer.step(0.0, clip_scale(norm, config.grad_clip) if config.grad_clip else None)
        if ema is not None:
            ema.update(1)

    return update
