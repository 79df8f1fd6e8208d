"""Alarms over the curves of a run: what goes wrong, since when, what to do, and the checkpoint to go back to.

Each check is a pure function of the curves. The limits are wide: what trains well, noisily or with steps in its loss,
raises none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Points = Sequence[tuple[int, float]]

_LAST, _MOST_NOT_FINITE = (
    100,
    3,
)  # training steps that are looked at for losses that are no numbers, and how many may be
_WINDOW = 25  # steps whose median stands for their loss, at least
_RISE = 1.3  # of the loss, over its best, that is a divergence
_FIRST, _OVER_FIRST = 3, 5.0  # steps of a run whose highest loss an untrained model has; times it, a divergence
_HELD_OUT_RISE, _BUCKET_RISE = 0.03, 0.05
_NEAR = 1.5  # times its least: where a loss has settled
_STILL, _LESS = 0.2, 0.4  # of the data's motion, and of the videos' own before
_SAME = 0.1  # of the diversity before


@dataclass(frozen=True)
class Curves:
    """Curves that alarms are computed from; steps ascend."""

    losses: Points  # of training, those that are not finite included
    held_out: Points = ()
    buckets: Mapping[str, Points] = field(default_factory=dict)  # held-out loss of each
    motion: Points = ()  # of the videos, as a multiple of the data's own
    diversity: Points = ()  # of videos of one prompt
    checkpoints: Sequence[int] = ()  # steps of those that are there


@dataclass(frozen=True)
class Alarm:
    """One thing that goes wrong."""

    kind: str  # nan, divergence, overfitting, bucket, motion, diversity
    step: int  # since when, as far as the curves tell
    reason: str
    advice: str
    checkpoint: int | None  # the step of the last checkpoint before it
    subject: str = ""  # the bucket, where it is about one

    def __str__(self) -> str:
        back = f"go back to the checkpoint of step {self.checkpoint}"
        if self.checkpoint is None:
            back = "no checkpoint is left from before it"
        return f"{self.kind} since step {self.step}: {self.reason}; {self.advice}; {back}"


def find_alarms(curves: Curves) -> list[Alarm]:
    """All alarms that the curves give now."""
    checks = (_not_finite, _divergence, _overfitting, _buckets, _motion, _diversity)
    return [alarm for check in checks for alarm in check(curves)]


def _alarm(curves: Curves, kind: str, good: int, step: int, reason: str, advice: str, subject: str = "") -> Alarm:
    """`good`: the last step at which all was well."""
    back = max((saved for saved in curves.checkpoints if saved <= good), default=None)
    return Alarm(kind, step, reason, advice, back, subject)


def _not_finite(curves: Curves) -> Iterator[Alarm]:
    bad = [step for step, loss in curves.losses[-_LAST:] if not math.isfinite(loss)]
    if len(bad) >= _MOST_NOT_FINITE:
        reason = f"{len(bad)} of the last {min(_LAST, len(curves.losses))} losses are not finite"
        advice = "lower lr, set grad_clip = 1.0, and look at the clips that metrics.jsonl lists for these steps"
        yield _alarm(curves, "nan", bad[0] - 1, bad[0], reason, advice)
    elif curves.held_out and not math.isfinite(curves.held_out[-1][1]):
        step = curves.held_out[-1][0]
        good = max((at for at, loss in curves.held_out if math.isfinite(loss)), default=0)
        yield _alarm(curves, "nan", good, step, "the held-out loss is not finite", "lower lr, set grad_clip = 1.0")


def _windows(losses: Points) -> tuple[list[int], np.ndarray, float]:
    """Return the last steps of windows of a training curve, their medians, and the noise of such a median."""
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    size = max(_WINDOW, len(finite) // 40)
    count = len(finite) // size
    kept = finite[len(finite) - count * size :]
    values = np.array([loss for _, loss in kept], float).reshape(count, size)
    if not count:
        return [], np.zeros(0), math.inf
    medians = np.median(values, axis=1)
    spread = np.median(np.abs(values - medians[:, None])) * 1.4826  # the standard deviation, of normal noise
    return [kept[(i + 1) * size - 1][0] for i in range(count)], medians, float(spread * 1.2533 / math.sqrt(size))


def _divergence(curves: Curves) -> Iterator[Alarm]:
    found = _risen_over_best(curves.losses) or _risen_over_first(curves.losses)
    if found is not None:
        good, since, reason = found
        yield _alarm(curves, "divergence", good, since, reason, "go on with a lower lr or a longer warm-up")


def _risen_over_best(losses: Points) -> tuple[int, int, str] | None:
    """Return the last step at which all was well, the one from which on the loss lies above its best, and the
    reason."""
    steps, medians, noise = _windows(losses)
    if len(medians) < 4:
        return None
    best = int(np.argmin(medians[:-2]))
    limit = max(_RISE * medians[best], medians[best] + 6 * noise) if medians[best] > 0 else math.inf
    if not (medians[-2:] > limit).all():
        return None
    since = next(i for i in range(best + 1, len(medians)) if (medians[i:] > limit).all())
    reason = f"the training loss is {medians[-1]:.4g}, {medians[-1] / medians[best]:.2g} times its best"
    return steps[since - 1], steps[since], reason


def _risen_over_first(losses: Points) -> tuple[int, int, str] | None:
    """Return the same of a loss that rises before it has a best: its last steps lie far above the first ones."""
    if len(losses) < _WINDOW or losses[0][0] != 1:  # a long run's first losses are not read
        return None
    values = np.array([loss for _, loss in losses], float)
    first = float(values[:_FIRST].max())
    limit = _OVER_FIRST * first
    if not 0 < limit < (now := float(np.median(values[-_WINDOW:]))):
        return None
    start = len(values) - _WINDOW
    while start > 0 and np.median(values[max(0, start - _WINDOW) : start]) > limit:
        start -= _WINDOW
    since = next(step for step, loss in losses[max(0, start - _WINDOW) :] if loss > limit)
    return since - 1, since, f"the training loss is {now:.4g}, {now / first:.2g} times that of the first steps"


def _risen(points: Points, share: float) -> tuple[int, int] | None:
    """Return the step of a curve's minimum, and that from which it stays above it by a fraction. None where it does
    not, or has done so for fewer than three points."""
    values = [value for _, value in points]
    if len(values) < 5 or not all(map(math.isfinite, values)):
        return None
    best = int(np.argmin(values))
    above = [i for i in range(best + 1, len(values)) if min(values[i:]) > values[best] * (1 + share)]
    return (points[best][0], points[above[0]][0]) if len(values) - min(above, default=len(values)) >= 3 else None


def _overfitting(curves: Curves) -> Iterator[Alarm]:
    if (found := _risen(curves.held_out, _HELD_OUT_RISE)) is None:
        return
    best, since = found
    steps, medians, noise = _windows(curves.losses)
    before = [median for step, median in zip(steps, medians, strict=True) if step <= best][-1:]
    if before and medians[-1] < before[0] - 2 * noise:
        rise = curves.held_out[-1][1] / dict(curves.held_out)[best] - 1
        reason = (
            f"the held-out loss is {100 * rise:.1f} % above its least, of step {best}, while the training loss falls"
        )
        advice = "stop here, take more clips, a smaller LoRA rank, or dropout_ratio"
        yield _alarm(curves, "overfitting", best, since, reason, advice)


def _buckets(curves: Curves) -> Iterator[Alarm]:
    whole = dict(curves.held_out)
    for name, points in curves.buckets.items():
        if len(curves.buckets) < 2 or (found := _risen(points, _BUCKET_RISE)) is None:
            continue
        best, since = found
        others = [dict(other) for key, other in curves.buckets.items() if key != name]
        last = points[-1][0]
        improve = [other[last] < other[best] for other in others if best in other and last in other]
        if improve and all(improve) and last in whole:
            rise = points[-1][1] / dict(points)[best] - 1
            reason = f"the held-out loss of {name} is {100 * rise:.1f} % above its least, and that of all others falls"
            advice = "raise its keep probability in bucket_config, and look at its clips and captions"
            yield _alarm(curves, "bucket", best, since, reason, advice, name)


def _settled(curves: Curves, points: Points) -> tuple[list[int], list[float]]:
    """Return the points of a curve from where the loss has come near its least on: before, videos are noise,
    then grey."""
    if curves.held_out:
        losses = [(step, loss) for step, loss in curves.held_out if math.isfinite(loss)]
    else:
        losses = list(zip(*_windows(curves.losses)[:2], strict=True))
    near = _NEAR * min((loss for _, loss in losses), default=0.0)
    first = next((step for step, loss in losses if loss <= near), math.inf)
    kept = [(step, value) for step, value in points if step >= max(first, 1)]
    return [step for step, _ in kept], [value for _, value in kept]


def _collapse(values: Sequence[float], share: float, limit: float = math.inf) -> tuple[int, float] | None:
    """Return the index from which a curve stays below a fraction of its usual value, and below a limit; and that
    value."""
    if len(values) < 5:
        return None
    usual = float(np.median(values[:-2]))
    bound = min(share * usual, limit)
    return (next(i for i in range(len(values)) if max(values[i:]) < bound), usual) if max(values[-2:]) < bound else None


def _motion(curves: Curves) -> Iterator[Alarm]:
    steps, values = _settled(curves, curves.motion)
    if found := _collapse(values, _LESS, _STILL):
        since, usual = found
        reason = f"the videos have {values[-1]:.2g} times the data's motion, {usual:.2g} before"
        advice = "look for stills or slow clips among the data, and raise guidance or the share of longer clips"
        yield _alarm(curves, "motion", steps[since - 1], steps[since], reason, advice)


def _diversity(curves: Curves) -> Iterator[Alarm]:
    steps, values = _settled(curves, curves.diversity)
    if found := _collapse(values, _SAME):
        since, usual = found
        reason = f"videos of one prompt lie {values[-1]:.3g} apart at different seeds, {usual:.3g} before"
        advice = "lower lr or the LoRA strength, and look for repeated clips"
        yield _alarm(curves, "diversity", steps[since - 1], steps[since], reason, advice)
