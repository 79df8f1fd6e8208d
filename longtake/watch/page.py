"""The page of a watched run: alarms, curves, a grid of prompts by checkpoints, and two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtake import pages
from longtake.data import ClipError
from longtake.durable import write_whole
from longtake.evaluate.validation import FOLDER as VIDEOS
from longtake.generate import read_video
from longtake.watch.judging import FOLDER, lines_of_both
from longtake.watch.telling import read_alarms, told

PAGE = "watch.html"
_MOST_STEPS, _MOST_PROMPTS = 8, 12
_FIGURES = {
    "motion": "motion",
    "motion_of_data": "motion, as a multiple of the data's",
    "flicker": "flicker",
    "sharpness": "sharpness",
    "drift": "drift of colour",
    "diversity": "diversity over seeds",
    "variety": "variety of prompts",
    "first_frame": "first frames given, PSNR in dB",
}
# Copies are put in both columns at once, so their films begin in the same frame.
_SCRIPT = """
const films = [...document.querySelectorAll('[data-step]')];
const sides = [...document.querySelectorAll('.side')];
const show = () => sides.forEach(side => side.querySelector('div').replaceChildren(
  ...films.filter(film => film.dataset.step === side.querySelector('select').value).map(film => film.cloneNode(true))));
sides.forEach(side => side.querySelector('select').addEventListener('change', show));
show();
"""


def write_page(run: Path) -> Path:
    """Writes `watch.html` of a run, which needs nothing else; returns its path."""
    lines = lines_of_both(run)
    videos = _videos(run)
    parts = [*_alarms(run), pages.html("<h2>Curves</h2>{}", _curves(lines))]
    if videos:
        parts += [*_side_by_side(list(videos)), *_grid(videos)]
    write_whole(run / PAGE, pages.page(f"Watching {run.resolve().name}", *parts))
    return run / PAGE


def _videos(run: Path) -> dict[int, list[Path]]:
    """The videos of each step, at most so many steps, evenly chosen, the last among them; of the run itself where
    nothing was made beside it."""
    found: dict[int, list[Path]] = {}
    for place in (run / VIDEOS, run / FOLDER / "raw" / VIDEOS, run / FOLDER / VIDEOS):
        for folder in place.glob("step*"):
            if files := sorted(path for path in folder.iterdir() if path.suffix in (".mp4", ".png")):
                found[int(folder.name.removeprefix("step"))] = files[:_MOST_PROMPTS]
    steps = sorted(found)
    places = np.linspace(0, len(steps) - 1, min(_MOST_STEPS, len(steps))).round().astype(int)
    return {steps[place]: found[steps[place]] for place in places}


def _alarms(run: Path) -> list[pages.Html]:
    rows = [pages.html('<p class="bad">{}</p>', told(run, alarm)) for alarm in read_alarms(run)]
    return [pages.html("<h2>Alarms</h2>{}", pages.joined(rows))] if rows else []


def _curves(lines: Sequence[Mapping[str, Any]]) -> pages.Html:
    kinds = sorted({line["weights"] for line in lines})
    of_kind = [[line for line in lines if line["weights"] == kind] for kind in kinds]

    def drawn(title: str, *keys: str, log: bool = False) -> pages.Html:
        found = [[(line["step"], _inner(line, keys)) for line in own] for own in of_kind]
        points = [[(step, value) for step, value in own if value is not None] for own in found]
        return pages.curves(title, [sorted(own) for own in points], log, mean_of=1) if any(points) else pages.joined([])

    levels = sorted({level for line in lines for level in line.get("levels", {})}, key=float)
    buckets = sorted({name for line in lines for name in line.get("buckets", {})})
    further = sorted({name for line in lines for name in line.get("videos", {})} - _FIGURES.keys())
    charts = [
        drawn("held-out loss", "loss", log=True),
        *(drawn(f"at noise level {level}", "levels", level, log=True) for level in levels),
        *(drawn(title, "videos", name) for name, title in _FIGURES.items()),
        *(drawn(name, "videos", name) for name in further),
        *(drawn(f"held-out loss of {name}", "buckets", name, "loss", log=True) for name in buckets if len(buckets) > 1),
    ]
    named = {"ema": "averaged weights", "raw": "raw weights"}
    legend = pages.keys({place: named[kind] for place, kind in enumerate(kinds)})
    return pages.joined([legend, pages.html('<div class="charts">{}</div>', pages.joined(charts))])


def _inner(line: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _side_by_side(steps: Sequence[int]) -> list[pages.Html]:
    def side(chosen: int) -> pages.Html:
        marks = {step: pages.Html(" selected") if step == chosen else "" for step in steps}
        options = (pages.html('<option value="{}"{}>step {}</option>', step, marks[step], step) for step in steps)
        return pages.html('<div class="side"><select>{}</select><div></div></div>', pages.joined(options))

    columns = pages.joined([side(steps[0]), side(steps[-1])])
    style = pages.Html("display:grid;grid-template-columns:1fr 1fr;gap:1rem")
    return [pages.html('<h2 id="samples">Side by side</h2><div class="plays" style="{}">{}</div>', style, columns)]


def _grid(videos: Mapping[int, Sequence[Path]]) -> list[pages.Html]:
    """A row for each prompt, a film for each checkpoint; and the script of the two columns above it."""
    names = list(dict.fromkeys(path.stem for paths in videos.values() for path in paths))
    rows = []
    for name in names:
        cells = [
            pages.html('<div data-step="{}">{}</div>', step, _film(path, f"step {step}"))
            for step, paths in videos.items()
            for path in paths
            if path.stem == name
        ]
        prompt = next(_prompt(path) for paths in videos.values() for path in paths if path.stem == name)
        rows.append(pages.html("<h3>{}</h3>{}", prompt, pages.grid(cells, plays=True)))
    script = pages.html("<script>{}</script>", pages.Html(_SCRIPT))
    return [pages.html("<h2>Prompts by checkpoints</h2>{}", pages.joined(rows)), script]


def _film(path: Path, said: str) -> pages.Html:
    try:
        frames = read_video(path)
    except ClipError as error:
        return pages.figure(pages.html('<p class="bad">cannot be read: {}</p>', error), said)
    return pages.figure(pages.film(frames, 8.0 if len(frames) > 1 else 1.0, _prompt(path)), said, _prompt(path))


def _prompt(path: Path) -> str:
    text = path.with_suffix(".txt")
    return text.read_text("utf-8", "replace").strip() if text.is_file() else path.stem
