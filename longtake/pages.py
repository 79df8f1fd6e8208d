"""HTML pages that hold all they show and run no script: one style, one head, one way to write numbers and to draw.

Whatever is not `Html` yet is escaped where it enters a page.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtake.contracts import visible

_COLOURS = ("#2f6fde", "#e0a100", "#15936a", "#c2483d", "#7d55c7", "#13a3b5", "#8a6d3b", "#8791a1")  # of parts
_MOST_POINTS = 600  # of a curve; more steps are drawn in groups, each from its least to its largest value
_MOST_FRAMES, _LONGEST_SIDE = 24, 320  # of a film
_PIXEL_ART = 128  # a film whose longer side is no more is kept without loss, and enlarged in squares
_BINS = 40
STYLE = (Path(__file__).with_name("report") / "style.css").read_text("utf-8")


class Html(str):
    """Text that is HTML already."""

    def __html__(self) -> str:
        """Return the text as it is, for templates."""
        return self


def html(pattern: str, *values: object) -> Html:
    """`pattern` with a value in the place of each {}; escaped what is not `Html`, spelled out what cannot be seen."""
    shown = (value if isinstance(value, Html) else escape(visible(str(value))) for value in values)
    return Html(pattern.format(*shown))


def joined(parts: Iterable[object]) -> Html:
    """Parts one after the other; what is not `Html` is escaped."""
    return Html("\n".join(html("{}", part) for part in parts))


def page(title: str, *parts: Html) -> str:
    """Return the whole page, with `title` as its heading."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    opening = f'<!doctype html>\n<html lang="en"><head>{head}<title>{{}}</title><style>{{}}</style></head><body>'
    return html(opening + "\n<h1>{}</h1>\n{}\n</body></html>\n", title, Html(STYLE), title, joined(parts))


def tiles(figures: Iterable[tuple[str, object]]) -> Html:
    """Return (what, figure) pairs as large figures side by side."""
    return html(
        '<div class="tiles">{}</div>',
        joined(html("<div><b>{}</b><span>{}</span></div>", figure, what) for what, figure in figures),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: Sequence[int] = (0,)) -> Html:
    """Rows of cells under `head`, if any; columns but `words` stand right. A row of one cell heads those below it.

    On a phone a row of three cells or more becomes lines of its own, each with the words of its column in front."""
    kinds = ["" if column in words else ' class="n"' for column in range(len(head))]
    narrow = len(head) > 2

    def body(row: Sequence[object]) -> Html:
        if len(row) == 1:
            return html(f'<tr><th colspan="{len(head)}">{{}}</th></tr>', row[0])
        names = [html(' data-head="{}"', name) if narrow else Html() for name in head]
        cells = (html(f"<td{kind}{{}}>{{}}</td>", *each) for kind, *each in zip(kinds, names, row, strict=True))
        return html("<tr>{}</tr>", joined(cells))

    heads = joined(html(f"<th{kind}>{{}}</th>", name) for kind, name in zip(kinds, head, strict=True))
    first = [html('<tr class="heads">{}</tr>', heads)] if any(head) else []
    kind = "wide narrow" if narrow else "wide"
    return html('<div class="{}"><table>{}</table></div>', kind, joined([*first, *map(body, rows)]))


def pairs(rows: Iterable[tuple[object, object]]) -> Html:
    """Return a table of what things are."""
    return html('<div class="pairs">{}</div>', table(("", ""), rows, words=(0, 1)))


def folded(summary: str, content: Html) -> Html:
    """Return content folded behind its summary until a reader opens it."""
    return html("<details><summary>{}</summary>{}</details>", summary, content)


def bar(parts: Sequence[tuple[float, str]], whole: float, mark: float | None = None, kind: str = "bar") -> Html:
    """(size, what it is) pairs side by side, each in its own colour; `whole` is the bar's width, `mark` a line in it.

    What does not go into the whole is cut off at its end."""
    pieces, left = [], whole
    for place, (size, title) in enumerate(parts):
        if width := max(0.0, min(size, left)):
            colour, share = _COLOURS[place % len(_COLOURS)], f"{100 * width / whole:.3f}"
            pieces.append(html('<i style="width:{}%;background:{}" title="{}"></i>', share, colour, title))
        left -= size
    if mark is not None:
        pieces.append(html('<u style="left:{}%"></u>', f"{100 * mark / whole:.3f}"))
    return html('<div class="{}">{}</div>', kind, joined(pieces))


def breakdown(parts: Sequence[tuple[float, str]]) -> Html:
    """(size, what it is) pairs as the parts of one large bar, and what its colours stand for."""
    shown = {place: name for place, (size, name) in enumerate(parts) if size}
    return joined([bar(parts, sum(size for size, _ in parts), kind="bar big"), keys(shown)])


def keys(names: Mapping[int, str]) -> Html:
    """Return the legend of a bar's colours: the name of each part by its index in the bar."""
    key = '<span class="key"><i style="background:{}"></i>{}</span>'
    return html("{}", joined(html(key, _COLOURS[place % len(_COLOURS)], name) for place, name in names.items()))


def meter(share: float, words: str | None = None) -> Html:
    """Return a share, 0 to 1, as a bar and in `words` or percent; a dash where there is none."""
    if math.isnan(share):
        return Html(percent(share))
    drawn = html('<div class="bar"><i style="width:{}%"></i></div>', f"{100 * min(1.0, share):.2f}")
    return html('<div class="meter">{}<span>{}</span></div>', drawn, words or percent(share))


def grid(figures: Iterable[Html], plays: bool = False) -> Html:
    """Figures in one grid. Films play while the pointer is on them and where there is no pointer; `plays`: always."""
    return html('<div class="{}">{}</div>', "grid plays" if plays else "grid", joined(figures))


def figure(picture: Html, *captions: object) -> Html:
    """Return a film, still or word of what is missing, of the size of all, with captions below; the first is
    set off."""
    lines = joined(html("<span>{}</span>", caption) for caption in captions if caption)
    return html('<figure><div class="screen">{}</div><figcaption>{}</figcaption></figure>', picture, lines)


def film(frames: np.ndarray, fps: float, alt: str) -> Html:
    """Frames uint8 `[T, H, W, 3]` as a strip that plays at their rate, the middle one at rest; one frame as a still.

    Long films are thinned and large frames reduced; small ones are kept as they are."""
    seconds, (height, width) = len(frames) / fps, frames.shape[1:3]
    if len(frames) > _MOST_FRAMES:
        frames = frames[np.linspace(0, len(frames) - 1, _MOST_FRAMES).round().astype(int)]
    frames = [thumbnail(frame) for frame in frames]
    small = max(height, width) <= _PIXEL_ART
    strip = Image.fromarray(np.concatenate(frames, axis=1))
    file = io.BytesIO()
    strip.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": 80}))
    data = f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
    side = "width" if width * 3 >= height * 4 else "height"
    box = f"--n:{len(frames)};--s:{seconds:.3f}s;{side}:100%;aspect-ratio:{width}/{height}"
    moved = f"width:{len(frames)}00%;transform:translateX(-{100 * (len(frames) // 2) / len(frames):.4f}%)"
    look = f'class="{"squares" if small else ""}" style="{moved}"'
    return html(f'<div class="film" tabindex="0" style="{box}"><img {look} alt="{{}}" src="{{}}"></div>', alt, data)


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """Return a frame uint8 `[H, W, 3]`, reduced to what a page shows of it."""
    picture = Image.fromarray(frame)
    picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), reducing_gap=2.0)
    return np.asarray(picture)


Points = Sequence[tuple[float, Any]]


def curve(title: str, points: Points, log: bool = False, mean_of: int | None = None) -> Html:
    """(step, value) pairs as a line and its running mean; values that are no finite numbers are left out and counted.

    `log`: a logarithmic scale, where all values are above 0. `mean_of`: as for `curves`."""
    return curves(title, [points], log, mean_of=mean_of)


def curves(title: str, runs: Sequence[Points], log: bool = False, by: str = "step", mean_of: int | None = None) -> Html:
    """Curves in one drawing, each by its running mean alone, in the colour that `keys` has for its place. `mean_of`: of
    so many values, 1 for the values themselves; None: of 25, or a fortieth of all."""
    kept = [[(x, value) for x, given in points if math.isfinite(value := _float(given))] for points in runs]
    found = [np.array(points, float).T for points in kept if len(points) > 1]
    if not found:
        return html("<div><h3>{}</h3><p>Too few steps for a curve.</p></div>", title)
    log = log and min(values.min() for _, values in found) > 0
    window = mean_of or max(25, max(len(values) for _, values in found) // 40)
    lines = [(steps, values, _running_mean(values, window)) for steps, values in found]
    if log:
        lines = [(x, np.log10(y), np.log10(np.maximum(mean, y.min()))) for x, y, mean in lines]
    drawn = [values if len(runs) == 1 else means for _, values, means in lines]
    low, high = min(values.min() for values in drawn), max(values.max() for values in drawn)
    if high - low < (0.1 if log else 1e-9 * abs(low) or 1e-9):
        low, high = low - 0.05 * (abs(low) or 1), high + 0.05 * (abs(high) or 1)
    first, last = min(steps[0] for steps, *_ in lines), max(steps[-1] for steps, *_ in lines)
    across, down = 100 / (max(1, last - first) if by == "step" else last - first or 1), 100 / (high - low)

    def line(numbers: Points, look: str) -> str:
        places = (f"{(x - first) * across:.2f} {(high - y) * down:.2f}" for x, y in numbers)
        return f'<path d="M{"L".join(places)}" stroke="{look}"/>'

    ticks = _log_ticks(low, high) if log else [(tick, tick) for tick in _even_ticks(low, high)]
    paths = [f'<path d="M0 {(high - y) * down:.2f}H100" stroke="var(--line)"/>' for y, _ in ticks]
    colours = [colour for colour, points in zip(cycle(_COLOURS), kept, strict=False) if len(points) > 1]
    for colour, (steps, values, means) in zip(colours, lines, strict=True):
        groups = zip(
            *(np.array_split(each, min(len(values), _MOST_POINTS)) for each in (steps, values, means)), strict=True
        )
        every, mean = [], []
        for at, those, averages in groups:
            every += [(at[0], those.min()), (at[0], those.max())]
            mean.append((at[0], averages[0]))
        alone = len(runs) == 1
        paths += [line(every, "var(--pale)")] * alone
        paths.append(line(mean, f'{"var(--accent)" if alone else colour}" stroke-width="2'))
    marks = [("y", f"top:{(high - y) * down:.2f}%", number(tick)) for y, tick in ticks]
    even = _even_ticks(first, last, whole=by == "step")
    marks += [("x", f"left:{(tick - first) * across:.2f}%", number(tick)) for tick in even]
    said = f"by {by}{', logarithmic' if log else ''}"
    if window > 1:
        said += f", {'and ' if len(runs) == 1 else ''}the mean of the last {window}"
    left_out = sum(map(len, runs)) - sum(map(len, kept))
    said += f"; {left_out:,} without a finite value left out" if left_out else ""
    return _plot(title, said, "plot", Html("".join(paths)), marks)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    sums, ends = np.cumsum([0, *values]), np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


def histogram(title: str, values: np.ndarray, low: float, high: float) -> Html:
    """How many of `values` (some numbers between `low` and `high`, the ends of all) lie where; logarithmic where all
    are above 0 and most far below the largest."""
    values = values[np.isfinite(values)]
    if not len(values) or not math.isfinite(high - low):
        return html("<div><h3>{}</h3><p>No finite numbers.</p></div>", title)
    median = float(np.median(values))
    log, whole = low > 0 and high > 30 * median, (values == np.round(values)).all() and high - low < _BINS
    if low < high:
        edges = (np.geomspace if log else np.linspace)(low, high, int(high - low) + 2 if whole else _BINS + 1)
        edges[[0, -1]] = low, high  # as geomspace leaves them but for rounding
        counts, _ = np.histogram(values, edges)
    else:
        edges, counts = np.full(4, low), np.array([0, len(values), 0])
    wide, tall = 100 / len(counts), 100 / counts.max()
    rects = [
        f'<rect x="{place * wide:.2f}" y="{100 - count * tall:.2f}" width="{0.92 * wide:.2f}" '
        f'height="{count * tall:.2f}"><title>{number(edges[place])} to {number(edges[place + 1])}: '
        f"{percent(count / len(values))}</title></rect>"
        for place, count in enumerate(counts.tolist())
        if count
    ]
    places = ((0, low), (100, high)) if low < high else ((50, low),)
    marks = [(f"x at{at}", f"left:{at}%", number(value)) for at, value in places]
    said = f"median {number(median)}{', logarithmic' if log else ''}"
    return _plot(title, said, "plot ends", Html("".join(rects)), marks)


def _plot(title: str, said: str, kind: str, drawing: Html, marks: Sequence[tuple[str, str, str]]) -> Html:
    """Return a drawing of 100 by 100, stretched to its place, with words in the page's own size around it."""
    shape = html('<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{}</svg>', drawing)
    words = joined(html('<span class="{}" style="{}">{}</span>', *mark) for mark in marks)
    place = '<div><h3>{} <span>{}</span></h3><div class="{}"><div>{}{}</div></div></div>'
    return html(place, title, said, kind, shape, words)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _log_ticks(low: float, high: float) -> list[tuple[float, float]]:
    """(logarithm, round number) pairs in [low, high], at most five: powers of ten, or more where there is room."""
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), tuple(np.arange(10, 100) / 10)):
        ticks = [digit * 10.0**decade for decade in range(math.floor(low), math.floor(high) + 1) for digit in digits]
        inside = [(math.log10(tick), tick) for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) >= 3:
            break
    return inside[:: -(-len(inside) // 5) or 1]


def _even_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """At most five round numbers in [low, high]."""
    unit = 10.0 ** math.floor(math.log10(max(high - low, 1e-300)))
    for size in (unit / 5, unit / 2, unit, 2 * unit, 5 * unit):
        size = max(1.0, size) if whole else size
        ticks = np.arange(math.ceil(low / size), math.floor(high / size) + 1) * size
        if len(ticks) <= 5:
            break
    return ticks.tolist()


def number(value: float, digits: int = 4) -> str:
    """Format a number for people, whole above 1,000: `1,234,567`, `3,412`, `0.3`, `0.00021`, `5e-7`."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.{digits}g}".replace("e+", "e")
    if abs(value) < 1e-4:
        return f"{value:.{digits}g}".replace("e-0", "e-")
    text = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """`98.3 %`, `100 %`; a dash where there was nothing to count."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}".removesuffix(".0") + " %"


def duration(seconds: float) -> str:
    """`0.25 s`, `45.2 s`, `5 min 6 s`, `3.4 h`, `5.2 days`."""
    if seconds < 99.5:
        return f"{number(seconds, 3)} s"
    if seconds < 5970:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{number(seconds / 3600, 3)} h" if seconds < 172_800 else f"{number(seconds / 86_400, 3)} days"


def money(amount: float) -> str:
    """`138,280`, `1.99`, without a currency."""
    return f"{amount:,.0f}" if amount >= 100 or amount == round(amount) else f"{amount:,.2f}"
