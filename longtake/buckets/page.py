"""The bucket report as a picture: which clips a pass uses, in which buckets, and how much of them is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtake.pages import Html, breakdown, folded, html, joined, meter, percent, table

_MOST_ROWS = 24  # buckets that are shown at once


def bucket_picture(report: Mapping[str, Any]) -> Html:
    """Return a report as plain data (`BucketReport.to_json`, `bucket_report.json`), as parts of a page."""
    clips, unused, used = report["clips"], list(report["unused"].items()), f"{report['used']:,} used"
    counted = report["pass"], f"{report['used']:,}", f"{clips:,}", f"{report['samples']:,}", f"{report['steps']:,}"
    kept = percent(1 - report["frames_cut"]), percent(1 - report["area_cut"])
    said = (
        "<p>Pass {}: <b>{} of {} clips</b> are used, {} samples in {} steps. Of their frames {} are kept, of "
        "their area {}.</p>"
    )
    parts = [
        html(said, *counted, *kept),
        breakdown([(report["used"], used), *((line["clips"], _unused(name, line)) for name, line in unused)]),
    ]
    buckets = sorted(report["buckets"].items(), key=lambda item: -item[1]["samples"])
    most = max((line["samples"] for _, line in buckets), default=1)
    head = ("bucket", "samples", "time kept", "picture kept", "frames x height x width", "batch", "micro-batches")
    rows = [_row(name, line, most) for name, line in buckets]
    parts += [table(head, rows[:_MOST_ROWS])] if rows else []
    if rest := rows[_MOST_ROWS:]:
        parts.append(folded(f"{len(rest)} smaller buckets", table(head, rest)))
    return joined(parts)


def _row(name: str, line: Mapping[str, Any], most: int) -> tuple[object, ...]:
    kept = meter(1 - line["frames_cut"]), meter(1 - line["area_cut"])
    shape = " x ".join(map(str, line["shape"]))
    counts = f"{line['batch_size']:,}", f"{line['micro_batches']:,}"
    return (name, meter(line["samples"] / most, f"{line['samples']:,}"), *kept, shape, *counts)


def _unused(name: str, line: Mapping[str, Any]) -> str:
    rows = ", ".join(map(str, line["example_rows"])) + (", ..." if line["clips"] > len(line["example_rows"]) else "")
    unused = "" if name == "held_back" else "unused: "
    return f"{line['clips']:,} {unused}{line['reason']} (rows {rows})"
