"""A plan as one HTML page: what to change, then every entry's memory against what a GPU has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from longtake.buckets import bucket_picture
from longtake.durable import write_whole
from longtake.pages import Html, bar, duration, html, joined, keys, money, number, page, percent, table, tiles
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

if TYPE_CHECKING:
    from longtake.plan.probe import Probed

_PARTS = ("weights", "gradients", "optimizer", "average", "encoders", "gathered blocks and buffers", "activations")
_MOST_OVER = 2  # a bar that is longer, in what a GPU has, is cut off


def write_html(path: Path, plan: RunPlan, name: str, probed: Sequence[Probed] = (), price: float | None = None) -> None:
    """Writes the plan of the run `name`, whole or not at all; `price`: of a GPU-hour."""
    clips = html('<p class="note">The clip table could not be read ({}).</p>', plan.no_report or "")
    if plan.report is not None:
        clips = bucket_picture(plan.report.to_json())
    parts = [
        html("<p>{}<br>{}</p>", head_words(plan), layout_words(plan)),
        tiles(_figures(plan, price)),
        html("<p>The run: {}.</p>", stage_words(plan, price)),
        *_changes(plan),
        html("<h2>Memory and time</h2>{}", _entries(plan)),
        *(html('<p class="note">{}</p>', words) for words in (level_words(plan),) if words),
        html("<h2>Clips</h2>{}", clips),
        html('<h2>Assumptions</h2><p class="note">{}.</p>', assumed_words(plan)),
    ]
    if probed:
        measured = table(probe_head(), [probe_row(one) for one in probed], words=(0, 1))
        parts[-2:-2] = [html("<h2>Measured</h2>{}", measured)]
    if plan.target_seconds is not None:
        parts[-2:-2] = [html("<h2>Batch sizes</h2><pre>{}</pre>", batches_words(plan, probed))]
    write_whole(path, page(f"Plan of {name}", *parts))


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


def _changes(plan: RunPlan) -> list[Html]:
    """What to do where not all entries fit."""
    if not plan.misfits:
        return []
    worst, remedies = plan.misfits[0], find_remedies(plan)
    count = f"{len(plan.misfits)} entries do" if len(plan.misfits) > 1 else "1 entry does"
    said = html(
        '<p><b class="bad">{} not fit</b> into the {} that a GPU has for the run. The worst, {} at batch {}, needs {}.'
        " {}</p>",
        *(count, gib(worst.usable_bytes), worst.name, worst.bucket.batch_size, gib(worst.memory.total)),
        "Each of these changes makes all fit:" if remedies else "No change of settings on these GPUs makes it fit.",
    )
    rows = [
        (html("<code>{}</code>", one.words), pace(one.slower), "as before" if one.same_steps else "others")
        for one in remedies
    ]
    head = ("change", "speed", "steps")
    return [html("<h2>What to change</h2>{}{}", said, table(head, rows, words=(0, 1, 2)) if rows else "")]


def _entries(plan: RunPlan) -> Html:
    """One table of all entries by resolution, the worst first, with bars of one scale."""
    usable = plan.machine.usable_bytes
    needs = [entry.memory.total for entry in plan.entries]
    whole = min(max([1.1 * usable, *needs]), _MOST_OVER * usable)
    degree, encoding = ("GPUs a sample",) if plan.degrees_differ else (), ("encoding",) if plan.encodes else ()
    head = ("frames", "memory a GPU", "GiB", "batch", "fits", "suggested", "a micro-batch", *encoding, "MFU", *degree)
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
    note = (
        f"Bars: memory at the worst moment of a step, from 0 to {gib(whole)}; the line is at {gib(usable)}, what a GPU "
        "has for the run, and what is longer is cut off. Gradients that come later are not in them. Each entry is at "
        "its aspect ratio of most tokens. fits: the largest batch in memory; suggested: the largest that takes no "
        "longer than " + ("the entry of most tokens at its own." if plan.target_seconds is None else "the target.")
    )
    parts = zip(_PARTS, zip(*(entry.memory.parts().values() for entry in plan.entries), strict=True), strict=True)
    spans = {number: f"{name} {_span(sizes)}" for number, (name, sizes) in enumerate(parts) if max(sizes)}
    return joined([keys(spans), table((*head, "samples"), rows), html('<p class="note">{}</p>', note)])


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
