"""The page of a watched run: alarms, curves, a grid of prompts by checkpoints, and two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtake import pages
from longtake.data.clips.video import ClipError
from longtake.durable import write_whole
from longtake.evaluate.validation import FOLDER as VIDEOS
from longtake.generate.run import read_video
from longtake.report import render
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


def write_page(run: Path) -> Path:
    """Write `watch.html` of a run, which needs nothing else; return its path."""
    lines = lines_of_both(run)
    videos = _videos(run)
    kinds = sorted({line["weights"] for line in lines})
    named = {"ema": "averaged weights", "raw": "raw weights"}
    text = render(
        "watch.html",
        title=f"Watching {run.resolve().name}",
        alarms=[told(run, alarm) for alarm in read_alarms(run)],
        weights={place: named[kind] for place, kind in enumerate(kinds)},
        curves=_curves(lines, kinds),
        steps=list(videos),
        prompts=_prompts(videos),
    )
    write_whole(run / PAGE, text)
    return run / PAGE


def _videos(run: Path) -> dict[int, list[Path]]:
    """Return the videos of each step, at most so many steps, evenly chosen, the last among them; of the run itself
    where nothing was made beside it."""
    found: dict[int, list[Path]] = {}
    for place in (run / VIDEOS, run / FOLDER / "raw" / VIDEOS, run / FOLDER / VIDEOS):
        for folder in place.glob("step*"):
            if files := sorted(path for path in folder.iterdir() if path.suffix in (".mp4", ".png")):
                found[int(folder.name.removeprefix("step"))] = files[:_MOST_PROMPTS]
    steps = sorted(found)
    places = np.linspace(0, len(steps) - 1, min(_MOST_STEPS, len(steps))).round().astype(int)
    return {steps[place]: found[steps[place]] for place in places}


def _curves(lines: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[pages.Html]:
    """Return a drawing per figure, with a curve per kind of weights."""
    of_kind = [[line for line in lines if line["weights"] == kind] for kind in kinds]

    def drawn(title: str, *keys: str, log: bool = False) -> pages.Html:
        found = [[(line["step"], _inner(line, keys)) for line in own] for own in of_kind]
        points = [[(step, value) for step, value in own if value is not None] for own in found]
        return pages.curves(title, [sorted(own) for own in points], log, mean_of=1) if any(points) else pages.joined([])

    levels = sorted({level for line in lines for level in line.get("levels", {})}, key=float)
    buckets = sorted({name for line in lines for name in line.get("buckets", {})})
    further = sorted({name for line in lines for name in line.get("videos", {})} - _FIGURES.keys())
    return [
        drawn("held-out loss", "loss", log=True),
        *(drawn(f"at noise level {level}", "levels", level, log=True) for level in levels),
        *(drawn(title, "videos", name) for name, title in _FIGURES.items()),
        *(drawn(name, "videos", name) for name in further),
        *(drawn(f"held-out loss of {name}", "buckets", name, "loss", log=True) for name in buckets if len(buckets) > 1),
    ]


def _inner(line: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _prompts(videos: Mapping[int, Sequence[Path]]) -> list[dict[str, object]]:
    """Return the text of each prompt, and its film at each checkpoint."""
    names = list(dict.fromkeys(path.stem for paths in videos.values() for path in paths))
    found = []
    for name in names:
        of_name = [(step, path) for step, paths in videos.items() for path in paths if path.stem == name]
        films = [
            pages.html('<div data-step="{}">{}</div>', step, _film(path, f"step {step}")) for step, path in of_name
        ]
        found.append({"text": _prompt(of_name[0][1]), "films": films})
    return found


def _film(path: Path, said: str) -> pages.Html:
    try:
        frames = read_video(path)
    except ClipError as error:
        return pages.figure(pages.html('<p class="bad">cannot be read: {}</p>', error), said)
    return pages.figure(pages.film(frames, 8.0 if len(frames) > 1 else 1.0, _prompt(path)), said, _prompt(path))


def _prompt(path: Path) -> str:
    text = path.with_suffix(".txt")
    return text.read_text("utf-8", "replace").strip() if text.is_file() else path.stem
