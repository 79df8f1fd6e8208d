"""The demo's report: one HTML file that holds everything it shows, and asks nothing of a network."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtake.demo.judge import Accuracy, Judgement, is_right
from longtake.durable import write_whole

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5d687b;--line:#e3e7ee;--paper:#fff;--card:#f6f8fb;--accent:#2f6fde;
--pale:#b9c7dd;--good:#15794a;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf2;--soft:#98a4b8;--line:#2c3443;--paper:#12161e;--card:#1a202b;
--accent:#7aa7ff;--pale:#42506a;--good:#5fd39a;--bad:#ff8a80}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);background:var(--paper);
margin:0 auto;max-width:66rem;padding:2.2rem 1.4rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .4rem}
h2{font-size:1.15rem;margin:2.6rem 0 .8rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h3{font-size:.95rem;margin:1.6rem 0 .6rem}
h3 span,.lead,.note{color:var(--soft);font-weight:400}
.lead{margin:0;max-width:50rem}.note{font-size:.88rem;margin:.2rem 0 .8rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1.6rem 0 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem}
.tiles b{display:block;font-size:1.55rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.85rem;line-height:1.3;display:block}
.samples{display:grid;gap:.9rem;grid-template-columns:repeat(auto-fill,minmax(9.4rem,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;overflow:hidden}
figure img{display:block;width:100%;height:8.4rem;object-fit:contain;image-rendering:pixelated;background:#8885}
figcaption{font-size:.82rem;line-height:1.35;padding:.45rem .6rem .55rem}
.ok,.no{display:block;font-size:.78rem}.ok{color:var(--good)}.no{color:var(--bad)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;font-size:.82rem;color:var(--soft)}
th,td{text-align:left;padding:.34rem 1rem .34rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}td:last-child,th:last-child{padding-right:0}
.bar{display:inline-block;width:5rem;height:.5rem;border-radius:4px;background:var(--line);margin-left:.6rem;
overflow:hidden;vertical-align:.06rem}.bar i{display:block;height:100%;background:var(--accent)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(19rem,1fr));gap:0 2.4rem}
code{font:.86rem ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
svg{display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
"""
_WIDTH, _HEIGHT = 920, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_WINDOW = 25  # steps in the running mean


@dataclass(frozen=True)
class ShownSample:
    prompt: str
    frames: np.ndarray  # uint8 [T, H, W, 3]
    judgement: Judgement


@dataclass(frozen=True)
class Group:
    """Videos of one kind: the main bucket, another bucket, held-out prompts."""

    title: str
    accuracy: Accuracy  # of all videos of the kind
    samples: Sequence[ShownSample]  # the ones shown


@dataclass(frozen=True)
class DemoReport:
    """Everything the report shows. The first group is the main bucket."""

    num_steps: int
    num_clips: int
    real: Accuracy  # of the judge, on the real clips
    groups: Sequence[Group]
    losses: Sequence[tuple[int, float]]  # (step, loss)
    buckets: Mapping[str, Mapping[str, Any]]  # of the last pass, as `bucket_report.json` has them
    seconds: Sequence[tuple[str, float]]  # (part of the demo, seconds)
    facts: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]  # (what for, command line)
    fps: float


def write_report(path: Path, report: DemoReport) -> None:
    """Writes the report to `path`, whole or not at all. No link leads out of it, pictures and videos are inside."""
    main = report.groups[0].accuracy
    lead = (
        f"A small video diffusion transformer was trained for {report.num_steps:,} steps on {report.num_clips:,} "
        "made-up clips, and made the videos below from their prompts. A judge that is shown nothing but pixels says "
        "which colour they have and which way it moves."
    )
    commands = [(name, f"<code>{escape(line)}</code>") for name, line in report.commands]
    tiles = {
        "right colour, main bucket": percent(main.colour),
        "right direction, main bucket": percent(main.direction),
        "training steps": f"{report.num_steps:,}",
        "from no clips to this page": clock(sum(seconds for _, seconds in report.seconds)),
    }
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Longtake demo</title>',
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>',
        f'<h1>Longtake demo</h1><p class="lead">{escape(lead)}</p>',
        '<div class="tiles">',
        *(f"<div><b>{figure}</b><span>{what}</span></div>" for what, figure in tiles.items()),
        "</div>",
        "<h2>Generated videos</h2>",
        *(_section(group, report.fps) for group in report.groups),
        "<h2>Accuracy</h2>",
        f'<p class="note">The judge names the colour of {percent(report.real.colour)} and the direction of '
        f"{percent(report.real.direction)} of the {report.real.count:,} real clips rightly.</p>",
        _accuracy(report.groups),
        '<h2>Loss</h2><p class="note">By step, on a logarithmic scale: each step, and the mean of the last 25.</p>',
        loss_curve(report.losses),
        f'<div class="pair"><div><h2>Buckets</h2>{_buckets(report.buckets)}</div>',
        f"<div><h2>Time</h2>{_times(report.seconds)}</div></div>",
        f"<h2>Run</h2>{_table(('', ''), [(name, escape(value)) for name, value in report.facts])}",
        f"<h2>Go on</h2>{_table(('', ''), commands)}",
        "</body></html>\n",
    ]
    write_whole(path, "\n".join(parts))


def percent(share: float) -> str:
    """`98.3 %`, `100 %`; a dash where there was nothing to judge."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}".removesuffix(".0") + " %"


def moving_picture(frames: np.ndarray, fps: float) -> str:
    """Frames uint8 `[T, H, W, 3]` as an animated PNG in a data URL: lossless, and every browser plays it."""
    pictures = [Image.fromarray(frame) for frame in frames]
    options = {"save_all": True, "append_images": pictures[1:], "duration": round(1000 / fps), "loop": 0}
    buffer = io.BytesIO()
    pictures[0].save(buffer, "PNG", **options)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _section(group: Group, fps: float) -> str:
    figures = "".join(_figure(sample, fps) for sample in group.samples)
    a = group.accuracy
    direction = "" if math.isnan(a.direction) else f", direction {percent(a.direction)}"
    said = f"colour {percent(a.colour)}{direction} right of {a.count}"
    return f'<h3>{escape(group.title)} <span>&middot; {said}</span></h3><div class="samples">{figures}</div>'


def _figure(sample: ShownSample, fps: float) -> str:
    seen, prompt = sample.judgement, escape(sample.prompt)
    colour, direction = is_right(sample.prompt, seen)
    words = [seen.colour or "no colour"]
    if direction is not None:
        words.append(seen.direction or "no motion")
    right = colour and direction is not False
    verdict = f'<span class="{"ok" if right else "no"}">{"✓" if right else "✗"} {escape(", ".join(words))}</span>'
    picture = f'<img alt="{prompt}" src="{moving_picture(sample.frames, fps)}">'
    return f"<figure>{picture}<figcaption>{prompt}{verdict}</figcaption></figure>"


def _accuracy(groups: Sequence[Group]) -> str:
    """Share of videos in which the judge saw the prompt's colour and direction."""
    rows = []
    for group in groups:
        a = group.accuracy
        rows.append((escape(group.title), str(a.count), *(_bar(share) for share in (a.colour, a.direction, a.both))))
    return _table(("videos", "count", "colour", "direction", "both"), rows)


def _bar(share: float) -> str:
    """A share as a number and a bar; a dash alone where there was nothing to judge."""
    if math.isnan(share):
        return percent(share)
    return f'{percent(share)}<span class="bar"><i style="width:{100 * share:.1f}%"></i></span>'


def _buckets(buckets: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for frames, height, width, _, b in sorted((*b["shape"], name, b) for name, b in buckets.items()):
        counts = (frames, b["batch_size"], b["clips"], b["micro_batches"])
        rows.append((f"{width} x {height}", *(f"{count:,}" for count in counts)))
    return _table(("width x height", "frames", "batch", "clips", "batches"), rows)


def _times(seconds: Sequence[tuple[str, float]]) -> str:
    total = sum(value for _, value in seconds)
    rows = [(escape(name), f"{value:.1f} s", f"{100 * value / max(total, 1e-9):.0f} %") for name, value in seconds]
    return _table(("part", "time", "share"), [*rows, ("<b>total</b>", f"<b>{total:.1f} s</b>", "")])


def clock(seconds: float) -> str:
    """`4:12`, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells that are HTML already; every column but the first stands right where the table has a head."""
    numbers = ' class="n"' if any(head) else ""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (f"<{tag}{numbers if i else ''}>{cell}</{tag}>" for i, cell in enumerate(row))
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line("th", head)] if any(head) else []
    lines += [line("td", row) for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


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
        ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} style="stroke:var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _even_ticks(steps[0], steps[-1]):
        x = _LEFT + (tick - steps[0]) * x_scale
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">step</text>')
    means = np.array([values[max(0, end - _WINDOW) : end].mean() for end in range(1, len(values) + 1)])
    parts += [line(values, "--pale", 1), line(means, "--accent", 2), "</svg>"]
    return "".join(parts)


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
