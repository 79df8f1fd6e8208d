"""A plan as one HTML page: what to change, then every entry's memory against what a GPU has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.buckets.page import bucket_picture
from longtake.durable import write_whole
from longtake.pages import bar, duration, html, money, number, percent, table
from longtake.plan.remedies import find_remedies, gib, pace
from longtake.plan.report import (
    assumed_words,
    batches_words,
    head_words,
    is_endless,
    layout_words,
    level_words,
    priced_steps,
    probe_head,
    probe_row,
    stage_words,
)
from longtake.plan.run import EntryPlan, RunPlan
from longtake.report import render

if TYPE_CHECKING:
    from longtake.plan.probe import Probed

_PARTS = ("weights", "gradients", "optimizer", "average", "encoders", "gathered blocks and buffers", "activations")
_MOST_OVER = 2  # a bar that is longer, in what a GPU has, is cut off


def write_html(path: Path, plan: RunPlan, name: str, probed: Sequence[Probed] = (), price: float | None = None) -> None:
    """Write the plan of the run `name`, whole or not at all; `price`: of a GPU-hour."""
    measured = table(probe_head(), [probe_row(row) for row in probed], words=(0, 1)) if probed else None
    text = render(
        "plan.html",
        title=f"Plan of {name}",
        head=head_words(plan),
        layout=layout_words(plan),
        figures=_figures(plan, price),
        stage=stage_words(plan, price),
        misfit=_misfit(plan),
        **_entries(plan),
        levels=level_words(plan),
        measured=measured,
        batches=None if plan.target_seconds is None else batches_words(plan, probed),
        clips=None if plan.report is None else bucket_picture(plan.report.to_json()),
        no_clips=(plan.no_report or "") if plan.report is None else None,
        assumptions=assumed_words(plan),
    )
    write_whole(path, text)


def _figures(plan: RunPlan, price: float | None) -> Iterator[tuple[str, str]]:
    entries, forecast = [entry for entry in plan.entries if entry.trains], plan.forecast
    fitting = len(entries) - len(plan.misfits)
    yield "of the bucket table's entries fit", f"{fitting} of {len(entries)}"
    yield "a step", duration(forecast.step_seconds)
    if forecast.steps is None:
        return
    steps, hours = priced_steps(plan)
    what = "a pass" if is_endless(plan) else f"{steps:,} steps"
    yield what, duration(steps * forecast.step_seconds)
    yield f"GPU-hours, {what}", number(hours)
    if price is not None:
        yield f"cost, {what}, at {money(price)} a GPU-hour", money(hours * price)


def _misfit(plan: RunPlan) -> dict[str, object] | None:
    """Return the worst entry that does not fit, and what makes all fit; None where all do."""
    if not plan.misfits:
        return None
    worst = plan.misfits[0]
    changes = [
        {"setting": one.words, "speed": pace(one.slower), "steps": "as before" if one.same_steps else "others"}
        for one in find_remedies(plan)
    ]
    return {
        "count": len(plan.misfits),
        "usable": gib(worst.usable_bytes),
        "worst": worst.name,
        "batch": worst.bucket.batch_size,
        "needs": gib(worst.memory.total),
        "changes": changes,
    }


def _entries(plan: RunPlan) -> dict[str, object]:
    """Return the table of all entries by resolution, the worst first, with bars of one scale; and what its
    notes need."""
    usable = plan.machine.usable_bytes
    needs = [entry.memory.total for entry in plan.entries]
    whole = min(max([1.1 * usable, *needs]), _MOST_OVER * usable)
    degree, encoding = ("GPUs a sample",) if plan.degrees_differ else (), ("encoding",) if plan.encodes else ()
    head = ("frames", "memory per GPU", "GiB", "batch", "fits", "suggested", "a micro-batch", *encoding, "MFU", *degree)
    worst: dict[str, int] = {}
    for entry in plan.entries:
        name = entry.bucket.resolution
        worst[name] = max(worst.get(name, 0), entry.memory.total)
    order = sorted(
        plan.entries,
        key=lambda entry: (-worst[entry.bucket.resolution], entry.bucket.resolution, -entry.memory.total),
    )
    rows: list[Sequence[object]] = []
    for resolution, entries in groupby(order, key=lambda entry: entry.bucket.resolution):
        found = list(entries)
        sizes = {entry.bucket.shape[1:] for entry in found}
        size = "".join(f", at {height} x {width}" for height, width in sizes) if len(sizes) == 1 else ""
        rows += [(resolution + size,), *(_row(entry, plan, whole) for entry in found)]
    parts = zip(_PARTS, zip(*(entry.memory.parts().values() for entry in plan.entries), strict=True), strict=True)
    return {
        "columns": (*head, "samples"),
        "entries": rows,
        "parts": {number: f"{name} {_span(sizes)}" for number, (name, sizes) in enumerate(parts) if max(sizes)},
        "scale": gib(whole),
        "usable": gib(usable),
        "pace": "the entry of most tokens at its own" if plan.target_seconds is None else "the target",
    }


def _span(sizes: Sequence[float]) -> str:
    low, high = f"{min(sizes) / 2**30:.1f}", f"{max(sizes) / 2**30:.1f}"
    return f"{low} GiB" if low == high else f"{low} to {high} GiB"


def _row(entry: EntryPlan, plan: RunPlan, whole: float) -> tuple[object, ...]:
    bucket, sizes = entry.bucket, entry.memory.parts().values()
    drawn = bar(
        [(size, f"{name}: {gib(size)}") for name, size in zip(_PARTS, sizes, strict=True)], whole, entry.usable_bytes
    )
    total = html(
        "{}" if entry.fits or not entry.trains else '<b class="bad">{}</b>', f"{entry.memory.total / 2**30:.1f}"
    )
    return (
        bucket.num_frames,
        drawn,
        total,
        bucket.batch_size,
        entry.largest_batch,
        entry.suggested_batch,
        duration(entry.time.seconds),
        *((duration(entry.time.encoding),) if plan.encodes else ()),
        percent(entry.time.mfu),
        *((entry.sequence,) if plan.degrees_differ else ()),
        "?" if entry.samples is None else f"{entry.samples:,}",
    )
