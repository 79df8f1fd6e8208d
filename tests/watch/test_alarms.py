"""Alarms: none on healthy runs of many kinds, and the right one, with its checkpoint, on each prepared illness."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longtake.watch.alarms import Curves, Points, find_alarms

# Training losses of real runs, of three significant digits; of some also what `longtake watch` has made of them.
HEALTHY = json.loads((Path(__file__).parent / "healthy.json").read_text("utf-8"))
SAVED = range(0, 4001, 100)


def trained(name: str) -> Curves:
    """A real run; where it had no validations, with such as healthy runs have: falling, a little noisy, then flat."""
    of, rng = HEALTHY[name], np.random.default_rng(7)
    losses = [(i * of["every"] + 1, loss) for i, loss in enumerate(of["losses"])]
    if "held_out" in of:  # its own
        return Curves(losses, of["held_out"], of["buckets"], of["motion"], of["diversity"], SAVED)
    steps = [step for step, _ in losses[:: len(losses) // 8]]
    low = np.minimum.accumulate(
        [np.mean([loss for _, loss in losses[max(0, i - 9) : i + 10]]) for i in range(len(losses))]
    )
    held_out = [(step, float(low[step // of["every"]] * rng.normal(1.1, 0.005))) for step in steps]
    buckets = {
        name: [(s, v * scale * rng.normal(1, 0.01)) for s, v in held_out] for name, scale in (("a", 1), ("b", 2))
    }
    motion = [(step, float(8 / (1 + i) + rng.uniform(0.6, 1.2))) for i, step in enumerate(steps)]
    diversity = [(step, float(rng.uniform(0.05, 0.2))) for step in steps]
    return Curves(losses, held_out, buckets, motion, diversity, SAVED)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm_at_any_moment(name: str) -> None:
    curves = trained(name)
    for end in range(50, curves.losses[-1][0] + 50, max(50, curves.losses[-1][0] // 20)):

        def until(points: Points, end: int = end) -> Points:
            return [point for point in points if point[0] <= end]

        parts = {key: until(getattr(curves, key)) for key in ("losses", "held_out", "motion", "diversity")}
        assert find_alarms(replace(curves, **parts, buckets={k: until(v) for k, v in curves.buckets.items()})) == []


WELL = Curves(
    losses=[(step, 1 / math.sqrt(step) * (1 + 0.2 * math.sin(7 * step))) for step in range(1, 2001)],
    held_out=[(step, 1.2 - step / 5000) for step in range(0, 2001, 200)],
    buckets={"a": [(step, 1.1 - step / 5000) for step in range(0, 2001, 200)]}
    | {"b": [(step, 1.3 - step / 5000) for step in range(0, 2001, 200)]},
    motion=[(step, 1.0) for step in range(0, 2001, 200)],
    diversity=[(step, 0.2) for step in range(0, 2001, 200)],
    checkpoints=SAVED,
)


def after(points: Points, since: int, change: float) -> Points:
    """The curve, but from a step on multiplied by more and more, up to `change` at its end."""
    last = points[-1][0]
    return [(s, v * change ** max(0, (s - since) / (last - since))) for s, v in points]


ILL = {
    "nan": replace(WELL, losses=[(s, math.nan if s > 1990 else v) for s, v in WELL.losses]),
    "divergence": replace(WELL, losses=[(s, v * (3 if s > 1500 else 1)) for s, v in WELL.losses]),
    "overfitting": replace(WELL, held_out=after(WELL.held_out, 1000, 2.0), buckets={}),
    "bucket": replace(WELL, buckets=WELL.buckets | {"b": after(WELL.buckets["b"], 1000, 2.0)}),
    "motion": replace(WELL, motion=[(s, 0.05 if s > 1200 else v) for s, v in WELL.motion]),
    "diversity": replace(WELL, diversity=[(s, 0.002 if s > 1500 else v) for s, v in WELL.diversity]),
}


def test_what_is_well_raises_none() -> None:
    assert find_alarms(WELL) == []


@pytest.mark.parametrize(("kind", "back"), list(zip(ILL, (1900, 1500, 1000, 1000, 1200, 1400), strict=True)))
def test_an_illness_has_its_alarm_alone_and_the_checkpoint_before_it(kind: str, back: int) -> None:
    (alarm,) = find_alarms(ILL[kind])
    assert alarm.kind == kind
    assert alarm.checkpoint == back
    assert back < alarm.step <= 2000
    assert f"go back to the checkpoint of step {back}" in str(alarm)
    assert (alarm.subject == "b") == (kind == "bucket")


def test_a_loss_that_rises_from_the_first_steps_on_is_a_divergence_while_it_stays_up() -> None:
    """The beginning of a run of the demo's at a rate of 1: it falls for a hundred steps from what it rose to."""
    risen = [0.236, 0.51, 1.22, 1310, 290, 86100, 491700, 9.6e7] + [2e5 * 0.85**i for i in range(92)]
    for end in range(25, 71):
        (alarm,) = find_alarms(Curves(list(enumerate(risen[:end], 1)), checkpoints=[20, 40]))
        assert (alarm.kind, alarm.step, alarm.checkpoint) == ("divergence", 4, None)
        assert "times that of the first steps" in alarm.reason
    assert find_alarms(Curves(list(enumerate(risen, 1)))) == []


def test_an_alarm_names_no_checkpoint_where_none_is_left() -> None:
    (alarm,) = find_alarms(replace(ILL["motion"], checkpoints=[1900]))
    assert alarm.checkpoint is None
    assert str(alarm).endswith("no checkpoint is left from before it")
