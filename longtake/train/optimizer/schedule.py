"""Learning rates as functions of the step: no state to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from longtake.train.config import RunConfig
from longtake.train.optimizer.config import GroupConfig, Point


def learning_rate(config: RunConfig, step: int, group: GroupConfig | None = None) -> float:
    """Return the rate in force at optimizer step `step` (from 0): of a group, or of the parameters that are in none."""
    own = config.optim if group is None else group
    if own.schedule is not None:
        return rate_between(own.schedule, step)
    if config.optim.schedule is not None and own.lr is None:
        return rate_between(config.optim.schedule, step)
    shared = config.optim.lr if config.optim.lr is not None else config.lr
    return rate_of_run(config, step, shared if own.lr is None else own.lr)


def rate_of_run(config: RunConfig, step: int, peak: float) -> float:
    """Return the rate that the run's own keys say, for a peak.

    Warm-up over W steps: `initial + (step + 1) / (W + 1) * (lr - initial)`, as Open-Sora 2.0's LinearWarmupLR. Then
    constant, a cosine to zero, or constant with a linear fall over the last `decay_fraction` of `max_steps`.
    """
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


def rate_between(points: Sequence[Point], step: int) -> float:
    """Return the rate at a step between two points: on the line, or on the half cosine, from one to the other."""
    if step <= points[0][0]:
        return points[0][1]
    for (start, begin, *shape), (end, until, *_) in pairwise(points):
        if step < end:
            done = (step - start) / (end - start)
            return begin + (until - begin) * (0.5 - 0.5 * math.cos(math.pi * done) if shape == ["cosine"] else done)
    return points[-1][1]
