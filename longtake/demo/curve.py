"""The loss by step as a drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_WIDTH, _HEIGHT = 920, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_WINDOW = 25  # steps in the running mean


def loss_curve(losses: Sequence[tuple[int, float]]) -> str:
    """(step, loss) pairs, losses above 0, as an inline SVG on a logarithmic scale: every step, and a running mean."""
    if len(losses) < 2:
        return "<p>Too few steps for a curve.</p>"
    steps = np.array([step for step, _ in losses], float)
    values = np.log10(np.maximum([loss for _, loss in losses], 1e-12))
    low, high = float(values.min()), float(values.max())
    if high - low < 0.1:
        low, high = low - 0.05, high + 0.05
    x_scale = (_WIDTH - _LEFT - _RIGHT) / (steps[-1] - steps[0])
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / (high - low)

    def line(series: np.ndarray, colour: str, stroke: float) -> str:
        points = zip(_LEFT + (steps - steps[0]) * x_scale, _TOP + (high - series) * y_scale, strict=True)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'fill="none" stroke-width="{stroke}" stroke-linejoin="round" style="stroke:var({colour})"'
        return f'<polyline {look} points="{path}"/>'

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="loss by step">']
    for tick in _log_ticks(low, high):
        y = _TOP + (high - math.log10(tick)) * y_scale
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" style="stroke:var(--line)"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _even_ticks(steps[0], steps[-1]):
        x = _LEFT + (tick - steps[0]) * x_scale
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">step</text>')
    parts += [line(values, "--pale", 1), line(_running_mean(values), "--accent", 2), "</svg>"]
    return "".join(parts)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and up to 24 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers whose logarithm lies in [low, high]: 1, 2, 5 times powers of ten, or more where there is room."""
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), tuple(np.arange(10, 100) / 10)):
        decades = range(math.floor(low), math.floor(high) + 1)
        ticks = [float(f"{d}e{decade}") for decade in decades for d in digits]
        inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) >= 3:
            return inside[:: -(-len(inside) // 8)]
    return inside


def _even_ticks(first: float, last: float) -> list[float]:
    """At most seven round step numbers in [first, last]."""
    unit = 10 ** math.floor(math.log10(max(last - first, 1)))
    for size in (unit / 5, unit / 2, unit, 2 * unit):
        size = max(1.0, size)
        ticks = np.arange(math.ceil(first / size) * size, last + size / 1000, size)
        if len(ticks) <= 7:
            break
    return ticks.tolist()
