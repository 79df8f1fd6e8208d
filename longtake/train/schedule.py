"""Learning rate as a function of the step: no state to save, nothing to restore."""

from __future__ import annotations

import math

from longtake.train.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate in force at optimizer step `step` (from 0).

    Warm-up over W steps: `initial + (step + 1) / (W + 1) * (lr - initial)`, as Open-Sora 2.0's LinearWarmupLR. Then
    constant, a cosine to zero, or constant with a linear fall over the last `decay_fraction` of `max_steps`.
    """
    peak = config.optim.lr if config.optim.lr is not None else config.lr
    warmup = config.warmup_steps or 0
    if step < warmup:
        return config.initial_lr + (step + 1) / (warmup + 1) * (peak - config.initial_lr)
    if config.use_cosine_scheduler:
        done = (step - warmup) / max(1, config.max_steps - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.decay_fraction:
        left = (config.max_steps - step) / max(1.0, config.decay_fraction * config.max_steps)
        return peak * (config.final_lr_ratio + (1 - config.final_lr_ratio) * min(1.0, max(0.0, left)))
    return peak
