"""Steps that were measured, in a run's log or by a probe, against their forecast: how far the two are apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from longtake.parallel.degrees import EntryKey
from longtake.plan.run import RunPlan, forecast_stage
from longtake.plan.speed import update_seconds

if TYPE_CHECKING:  # its module imports all that trains
    from longtake.plan.probe import Probed

_FEWEST = 4  # steps that say something


@dataclass(frozen=True)
class Logged:
    """Seconds of steps over their forecast."""

    steps: int
    said: str  # what these are
    middle: float  # the median
    low: float  # a tenth of the steps lie below
    high: float  # a tenth above
    entries: Mapping[EntryKey, float]  # medians, of the steps in which an entry of the bucket table takes longest


def compare_with_log(
    plan: RunPlan, lines: Sequence[Mapping[str, Any]], left_out: Collection[int] = ()
) -> Logged | None:
    """Return the steps of a `metrics.jsonl`, waiting for data apart, but for those `left_out` by number, against the
    forecast of the longest of their buckets; None where there are too few."""
    work, layout, machine = plan.work, plan.layout, plan.machine
    update, buckets = update_seconds(work.model, layout, machine), {one.name: one for one in work.rule.buckets}
    ratios: dict[EntryKey, list[float]] = defaultdict(list)
    seconds = {name: 0.0 for line in lines for name in line.get("buckets", ()) if name in buckets}
    seconds = {name: work.time(buckets[name], layout, machine).seconds for name in seconds}
    for line in lines:
        ran = [name for name in line.get("buckets", ()) if name in seconds]
        if ran and line["step"] not in left_out and not line.get("skipped"):
            longest = max(ran, key=seconds.__getitem__)
            ratio = (line["seconds"] - line.get("wait", 0.0)) / (layout.micro_batches * seconds[longest] + update)
            ratios[buckets[longest].entry].append(ratio)
    return _spread(ratios, "steps of this run's log") if sum(map(len, ratios.values())) >= _FEWEST else None


def compare_with_probe(plan: RunPlan, probed: Sequence[Probed]) -> Logged | None:
    """Return the micro-batches of a probe that did not run out of memory; None without any."""
    work, ratios = plan.work, defaultdict(list)
    for one in probed:
        for step in one.tries:
            if step.seconds is not None:
                time = work.time(one.entry.bucket, plan.layout, plan.machine, step.batch)
                ratios[one.entry.bucket.entry].append(step.seconds / (time.seconds - time.encoding))
    return _spread(ratios, "micro-batches of the probe") if ratios else None


def _spread(ratios: Mapping[EntryKey, list[float]], said: str) -> Logged:
    every = [ratio for of in ratios.values() for ratio in of]
    tenths = quantiles(every, n=10, method="inclusive") if len(every) > 1 else every
    entries = {one: median(of) for one, of in ratios.items()}
    return Logged(len(every), said, median(every), tenths[0], tenths[-1], entries)


def as_logged(plan: RunPlan, logged: Logged) -> RunPlan:
    """Return the plan with its step and stage by the log; entries that no step was of by the median of all."""
    factors = dict.fromkeys((bucket.entry for bucket in plan.work.entries), logged.middle) | dict(logged.entries)
    return replace(plan, forecast=forecast_stage(plan.work, plan.layout, plan.machine, plan.report, factors))


def logged_words(logged: Logged) -> str:
    """Describe the error of the forecast."""
    entries = ", ".join(f"{name}/{frames}f {ratio:.2f}" for (name, frames), ratio in logged.entries.items())
    return (
        f"measured: {logged.steps:,} {logged.said} took {logged.middle:.2f} times the forecast of their buckets "
        f"({logged.low:.2f} to {logged.high:.2f} for four fifths of them; {entries})"
    )
