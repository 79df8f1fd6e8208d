"""The demo's report: one HTML file that holds everything it shows."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from longtake.evaluate import Accuracy, Judgement, is_right

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#1c2330;background:#fff}
h1{margin-bottom:0}h2{margin-top:2.2rem;border-bottom:1px solid #d8dee8;padding-bottom:.2rem}
table{border-collapse:collapse}th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid #eef1f5}
td.n,th.n{text-align:right}.lead{color:#5a6578}.samples{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fill,minmax(9rem,1fr))}figure{margin:0}figure img{height:8rem;image-rendering:pixelated;
border-radius:4px;background:#eee}figcaption{font-size:.85rem}.ok{color:#16794c}.no{color:#b3261e}
pre{background:#f5f7fa;padding:.8rem;overflow:auto;font-size:.82rem}svg text{font:11px system-ui;fill:#5a6578}
"""


@dataclass(frozen=True)
class Sample:
    """A generated video and what the judge saw in it."""

    prompt: str
    frames: np.ndarray  # uint8 [T, H, W, 3]
    judgement: Judgement


@dataclass(frozen=True)
class Group:
    """Videos of one kind: the main bucket, another bucket, held-out prompts."""

    title: str
    accuracy: Accuracy
    samples: Sequence[Sample]  # the ones shown


@dataclass(frozen=True)
class DemoReport:
    """Everything the report shows."""

    summary: str
    groups: Sequence[Group]
    losses: Sequence[tuple[int, float]]  # (step, loss)
    buckets: str  # the bucket report as text
    seconds: Sequence[tuple[str, float]]  # (part of the demo, seconds)
    facts: Sequence[tuple[str, str]]
    fps: float


def write_report(path: Path, report: DemoReport) -> None:
    """Writes the report to `path`: no link leads out of it, pictures and videos are inside."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Longtake demo</title>",
        f"<style>{_STYLE}</style><h1>Longtake demo</h1><p class=lead>{escape(report.summary)}</p>",
        "<h2>Accuracy</h2>",
        accuracy_table(report.groups),
        "<h2>Loss</h2>",
        loss_curve(report.losses),
        *(section(group, report.fps) for group in report.groups),
        f"<h2>Buckets</h2><pre>{escape(report.buckets)}</pre>",
        "<h2>Time</h2>",
        _table(("part", "seconds"), [(name, f"{seconds:.1f}") for name, seconds in report.seconds]),
        "<h2>Run</h2>",
        _table(("", ""), report.facts),
        "</html>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def accuracy_table(groups: Sequence[Group]) -> str:
    """Share of videos in which the judge saw the prompt's colour and direction, as HTML."""
    rows = [
        (g.title, str(g.accuracy.count), *(f"{share:.0%}" for share in (g.accuracy.colour, g.accuracy.direction, g.accuracy.both)))
        for g in groups
    ]
    return _table(("videos of", "count", "colour", "direction", "both"), rows)


def section(group: Group, fps: float) -> str:
    """One kind of videos, playing beside their prompts, as HTML."""
    figures = []
    for sample in group.samples:
        seen = sample.judgement
        right = all(part is not False for part in is_right(sample.prompt, seen))
        verdict = f"{seen.colour or 'no colour'}, {seen.direction or 'no motion'}"
        figures.append(
            f'<figure><img alt="{escape(sample.prompt)}" src="{moving_picture(sample.frames, fps)}">'
            f"<figcaption>{escape(sample.prompt)}<br><span class={'ok' if right else 'no'}>judge: {escape(verdict)}</span>"
            "</figcaption></figure>"
        )
    return f"<h2>{escape(group.title)}</h2><div class=samples>{''.join(figures)}</div>"


def moving_picture(frames: np.ndarray, fps: float) -> str:
    """Frames uint8 `[T, H, W, 3]` as an animated PNG in a data URL: lossless, and every browser plays it."""
    pictures = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "PNG", save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0, default_image=False
    )
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def loss_curve(losses: Sequence[tuple[int, float]], width: int = 860, height: int = 220) -> str:
    """The loss by step as an SVG: each step in grey, the mean of the last 25 in blue, on a logarithmic scale."""
    if len(losses) < 2:
        return "<p>too few steps for a curve</p>"
    steps = np.array([step for step, _ in losses], float)
    values = np.log10(np.maximum([loss for _, loss in losses], 1e-6))
    smooth = np.convolve(np.pad(values, (24, 0), mode="edge"), np.ones(25) / 25, mode="valid")
    low, high = float(values.min()), float(values.max())
    x = 50 + (steps - steps[0]) / (steps[-1] - steps[0]) * (width - 60)
    scale = (height - 40) / max(high - low, 1e-6)

    def line(series: np.ndarray, colour: str, stroke: float) -> str:
        y = 10 + (high - series) * scale
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{stroke}" points="{points}"/>'

    labels = "".join(
        f'<text x="44" y="{14 + (high - tick) * scale:.0f}" text-anchor="end">{10**tick:.3g}</text>'
        for tick in np.linspace(low, high, 4)
    )
    ends = f'<text x="50" y="{height - 8}">step {steps[0]:.0f}</text>'
    ends += f'<text x="{width - 10}" y="{height - 8}" text-anchor="end">step {steps[-1]:.0f}</text>'
    lines = line(values, "#c3ccda", 1) + line(smooth, "#2f6fde", 2)
    return f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="loss by step">{lines}{labels}{ends}</svg>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th{' class=n' if i else ''}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"
