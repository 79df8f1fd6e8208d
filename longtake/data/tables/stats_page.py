"""A clip table as one HTML page: what a run's buckets take of it, example clips, histograms, the numbers of columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from longtake.data.clips.animation import is_still
from longtake.data.clips.file_cache import FileCache
from longtake.data.clips.locations import join_location
from longtake.data.clips.video import ClipError, decode_frames, read_image
from longtake.data.probing.one_file import probe_file
from longtake.data.tables.stats import TableStats, column_rows, named_columns, table_facts
from longtake.pages import Html, figure, film, histogram, html, thumbnail
from longtake.report import render

FILM_SECONDS = 2.0  # the most of a clip that is shown, from around its middle
Film = tuple[np.ndarray, float]  # uint8 [T, H, W, 3], frames a second


def stats_page(stats: TableStats, open_clip: Callable[[str], Film], buckets: Html | None = None) -> str:
    """Return the page. `open_clip(path as written)` gives a piece of a clip or raises `ClipError`; `buckets`: the
    picture of a run's buckets."""
    facts = table_facts(stats)
    return render(
        "stats.html",
        title=str(stats.source),
        figures=[fact for fact in facts if fact[0] in ("rows", "videos", "stills", "hours", "seconds")],
        buckets=buckets,
        examples=[_example(row, path, text, open_clip) for row, path, text in stats.examples],
        film_seconds=f"{FILM_SECONDS:g}",
        histograms=[
            histogram(name, column.sample, column.smallest, column.largest)
            for name, column in named_columns(stats).items()
            if column.filled
        ],
        sampled=stats.sampled,
        rows=stats.rows,
        columns=column_rows(stats),
        facts=facts,
    )


def film_reader(start: Path | str, cache: FileCache) -> Callable[[str], Film]:
    """Read a piece of a clip by its path as written, for `stats_page`.

    `start`: the folder or URL that relative paths start from; `cache`: where files that lie on servers are fetched to.
    """

    def read(path: str) -> Film:
        if not path:
            raise ClipError("path is empty")
        with cache.local(join_location(start, path)) as file:
            return short_film(file)

    return read


def short_film(path: str, most_seconds: float = FILM_SECONDS, most_frames: int = 12) -> Film:
    """Return a piece from around the middle of a video, or a still: small frames, and their rate. Raises
    `ClipError`."""
    if is_still(path):
        return thumbnail(read_image(path)[0])[None], 1.0
    clip = probe_file(path)
    fps = clip.fps if clip.fps > 0 else 8.0
    span = int(min(clip.num_frames, max(1, most_seconds * fps)))
    count = min(span, most_frames)
    places = (clip.num_frames - span) // 2 + np.arange(count) * span // count
    frames = [np.empty(0)] * count
    for wanted, pixels in decode_frames(path, places):
        for place in wanted:
            frames[place] = thumbnail(pixels)
    return np.stack(frames), fps * count / span


def _example(row: int, path: str, text: str, open_clip: Callable[[str], Film]) -> Html:
    try:
        picture = film(*open_clip(path), alt=text or path)
    except ClipError as error:
        picture = html('<p class="bad">cannot be read: {}</p>', error)
    return figure(picture, text or "(no caption)", f"row {row}: {path}")
