"""The numbers of a clip table as one HTML file that needs nothing else: histograms, example frames, the buckets."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from longtake.data.clips.remote import FileCache, join_location
from longtake.data.clips.video import ClipError, is_image, read_frames, read_image
from longtake.data.probing.one_file import probe_file
from longtake.data.tables.stats import NumberColumn, TableStats, column_rows, named_columns, number, table_facts

_BINS, _WIDTH, _HEIGHT = 40, 360, 120  # bars, and pixels of a drawing
_FRAME_PIXELS = 320  # longer side of an example
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
table { border-collapse: collapse } td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.grid { display: flex; flex-wrap: wrap; gap: 1.2rem } figure { margin: 0; width: 360px } img { max-width: 100% }
figcaption { font-size: .85rem; color: #555; overflow-wrap: anywhere } pre { overflow-x: auto; font-size: .85rem }
.bad { color: #a11 } svg { background: #f6f6f4 } rect { fill: #4a7ba6 }
"""


def stats_page(stats: TableStats, open_clip: Callable[[str], np.ndarray], report: str | None = None) -> str:
    """The page. `open_clip(path as written)` gives a frame, uint8 [H, W, 3], or raises `ClipError`; `report`: the
    bucket report of a run, as text."""
    name = escape(str(stats.source))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>',
        f"<h1>{name}</h1>",
        _table(("", ""), table_facts(stats), numbers=()),
        "<h2>Columns</h2>",
        _table(("column", "empty", "min", "median", "mean", "max"), column_rows(stats), numbers=range(1, 6)),
    ]
    if stats.sampled < stats.rows:
        parts.append(f"<p>Medians and histograms are of {stats.sampled:,} rows drawn at random.</p>")
    parts.append('<h2>Histograms</h2><div class="grid">')
    parts += [_histogram(title, column) for title, column in named_columns(stats).items() if len(column.sample)]
    parts.append("</div>")
    if stats.examples:
        parts.append('<h2>Examples</h2><div class="grid">')
        parts += [_example(row, path, text, open_clip) for row, path, text in stats.examples]
        parts.append("</div>")
    if report is not None:
        parts.append(f"<h2>Buckets</h2><pre>{escape(report)}</pre>")
    return "\n".join(parts) + "\n</html>\n"


def frame_reader(start: Path | str, cache: FileCache) -> Callable[[str], np.ndarray]:
    """Reads the middle frame of a clip by its path as written, for `stats_page`.

    `start`: the folder or URL that relative paths start from; `cache`: where files that lie on servers are fetched to.
    """

    def read(path: str) -> np.ndarray:
        if not path:
            raise ClipError("path is empty")
        with cache.local(join_location(start, path)) as file:
            return middle_frame(file)

    return read


def middle_frame(path: str) -> np.ndarray:
    """The middle frame of a video, or a still: uint8 [H, W, 3]. Raises `ClipError`."""
    if is_image(path):
        return read_image(path)[0]
    return read_frames(path, [probe_file(path).num_frames // 2])[0]


def _histogram(title: str, column: NumberColumn) -> str:
    """Bars over the middle 99.8 % of the values, as SVG; what lies outside counts in the outermost bars."""
    values = column.sample
    low, high = np.quantile(values, (0.001, 0.999))
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = _BINS
    if (values == np.round(values)).all() and high - low < _BINS:
        low, high = np.floor(low) - 0.5, np.ceil(high) + 0.5
        bins = int(high - low)
    counts, _ = np.histogram(np.clip(values, low, high), bins, (low, high))
    width, most = _WIDTH / bins, counts.max()
    bars = "".join(
        f'<rect x="{place * width:.1f}" y="{_HEIGHT * (1 - count / most):.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{_HEIGHT * count / most:.1f}"><title>{number(low + (high - low) * place / bins)} to '
        f"{number(low + (high - low) * (place + 1) / bins)}: {count:,}</title></rect>"
        for place, count in enumerate(counts.tolist())
        if count
    )
    drawing = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{bars}</svg>'
    below = f"{escape(title)}: {number(low)} to {number(high)}, median {number(column.median)}"
    return f"<figure>{drawing}<figcaption>{below}</figcaption></figure>"


def _example(row: int, path: str, text: str, open_clip: Callable[[str], np.ndarray]) -> str:
    try:
        picture = f'<img alt="" src="{_jpeg(open_clip(path))}">'
    except ClipError as error:
        picture = f'<p class="bad">cannot be read: {escape(str(error))}</p>'
    return f"<figure>{picture}<figcaption>row {row}: {escape(path)}<br>{escape(text)}</figcaption></figure>"


def _jpeg(pixels: np.ndarray) -> str:
    picture = Image.fromarray(pixels)
    picture.thumbnail((_FRAME_PIXELS, _FRAME_PIXELS))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inside = "".join(
            f"<{tag}{' class=n' if place in numbers else ''}>{escape(cell)}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr>{inside}</tr>"

    first = line(head, "th") if any(head) else ""
    return f"<table>{first}{''.join(line(row, 'td') for row in rows)}</table>"
