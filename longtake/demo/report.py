"""The demo's report: that of its run, with what was generated and what a judge of pixels saw in it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtake.demo.extras import Check
from longtake.demo.judge import JUDGED, Accuracy, Judgement, is_right, judge, scenes_of
from longtake.demo.place import SUMMARY
from longtake.durable import write_whole
from longtake.pages import (
    Html,
    breakdown,
    duration,
    figure,
    film,
    grid,
    html,
    joined,
    meter,
    page,
    percent,
    table,
    tiles,
)
from longtake.train.report import RunRecord, run_sections


@dataclass(frozen=True)
class ShownSample:
    prompt: str
    frames: np.ndarray  # uint8 [T, H, W, 3]
    seen: Sequence[tuple[str, Judgement]]  # of each scene, what it was to show and what it does

    @classmethod
    def of(cls, prompt: str, frames: np.ndarray, made: slice = slice(None)) -> ShownSample:
        """made: as for `judge`."""
        scenes = [(text, judge(part, made)) for text, part in scenes_of(prompt, frames)]
        words = "; ".join(json.loads(prompt)) if len(scenes) > 1 else prompt
        return cls(words, frames, scenes)


@dataclass(frozen=True)
class Group:
    """Videos of one kind: the main bucket, another bucket, held-out prompts."""

    title: str
    accuracy: Accuracy  # of all videos of the kind
    samples: Sequence[ShownSample]  # the ones shown


def write_report(
    path: Path,
    record: RunRecord,
    groups: Sequence[Group],
    real: Accuracy,
    seconds: Mapping[str, float],
    facts: Sequence[tuple[str, str]] = (),
    checks: Sequence[Check] = (),
) -> None:
    """Write the report, whole or not at all, and its summary beside it. `groups`: the main bucket first; `real`: the
    judge's accuracy on the real clips; `seconds`: of each part of the demo."""
    main, total = groups[0].accuracy, sum(seconds.values())
    lead = (
        f"A small video diffusion transformer was trained for {record.step:,} steps on made-up clips, and made the "
        "videos below from their prompts. A judge that is shown nothing but pixels says which colour and shape they "
        "have and which way it moves."
    )
    figures = [
        ("right colour, main bucket", percent(main.colour)),
        ("right shape, main bucket", percent(main.shape)),
        ("right direction, main bucket", percent(main.direction)),
        ("training steps", f"{record.step:,}"),
        ("from no clips to this page", duration(total)),
    ]
    judged = (
        f"The judge names the colour of {percent(real.colour)}, the shape of {percent(real.shape)} and the "
        f"direction of {percent(real.direction)} of the "
        f"{real.count:,} real clips correctly. A second judge finds that the shape goes on evenly from frame to frame, "
        f"without a jump in place or size, in {percent(real.continuity)} of them."
    )
    shares = [(group.title, group.accuracy) for group in groups]
    rows = [(title, a.count, *map(meter, a.shares.values())) for title, a in shares]
    columns = ("videos", "count", *groups[0].accuracy.shares)
    parts = breakdown([(each, f"{name} {duration(each)}") for name, each in seconds.items()])
    shown = joined(_section(group, record.config.fps_save) for group in groups)
    found = [(check.what, check.found, check.wanted) for check in checks]
    looked = html("<h3>Beside these</h3>{}", table(("what", "found", "wanted"), found, words=(0,))) if found else ""
    sections = [
        html("<p>{}</p>{}<h2>Generated videos</h2>{}", lead, tiles(figures), shown),
        html("<h2>Accuracy</h2><p>{}</p>{}{}", judged, table(columns, rows), looked),
        html("<h2>Parts of the demo</h2>{}", parts),
    ]
    summary = {
        "model": record.config.model.type,
        "steps": record.step,
        "seconds": total,
        "columns": columns,
        "rows": [(title, a.count, *map(str, a.shares.values())) for title, a in shares],
        "checks": found,
        "shown": _grid(groups[0].samples[:6], record.config.fps_save),
    }
    write_whole(path.with_name(SUMMARY), json.dumps(summary) + "\n")
    write_whole(path, page("Longtake demo", *sections, *run_sections(record, facts, "a green square moves up")))


def _section(group: Group, fps: float) -> Html:
    a = group.accuracy
    named = [f"{name} {percent(a.shares[name])}" for name in JUDGED if not math.isnan(a.shares[name])]
    head = html("<h3>{} <span>{} right of {}</span></h3>", group.title, ", ".join(named), a.count)
    return joined([head, _grid(group.samples, fps)])


def _grid(samples: Sequence[ShownSample], fps: float) -> Html:
    return grid((_figure(sample, fps) for sample in samples), plays=True)


def _figure(sample: ShownSample, fps: float) -> Html:
    """Return a video, its prompt, and whether that is what the judge saw."""
    verdict = joined(_verdict(text, seen) for text, seen in sample.seen)
    return figure(film(sample.frames, fps, sample.prompt), sample.prompt, verdict)


def _verdict(text: str, seen: Judgement) -> Html:
    verdict = is_right(text, seen)
    words = [seen.colour or "no colour"]
    if verdict.shape is not None:
        words.append(seen.shape or "no shape")
    if verdict.direction is not None:
        words.append(seen.direction or "no motion")
    is_good = verdict.colour and verdict.shape is not False and verdict.direction is not False
    kind, mark = ("good", "✓") if is_good else ("bad", "✗")
    return html(f'<b class="{kind}">{mark} {{}}</b> ', ", ".join(words))
