"""What is written about a clip: the text a model reads, made alike for training and generation, and, in cells of its
table and in files beside it, captions of its segments, names of other files, and lines of numbers, one a frame."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from longtake.data.clips.video import ClipError
from longtake.data.rules import named
from longtake.small_files import parse_json, read_small, readable_text

Kind = Literal["train", "inference"]

_SUFFIX = re.compile(r"(^|[.!?…。！？] )(\d+ FPS|\d+ FPS, \d+ motion score|\d+ motion score)\.$")
_RATE = r"\d+(?:\.\d+)? FPS(?:, \d+ motion score)?\.(?: \d+ motion score\.)?|\d+ motion score\."
_SCORES = r"(?:(?:aesthetic score|motion score|camera motion): [^:]{1,40}?\.(?: |$))+"
_END = re.compile(rf"(?:^|(?<=\s))(?:{_RATE}|{_SCORES})$")  # what the forms of all families append
_ENDS_IN_RATE = re.compile(r"\d+ FPS\.$")
_SENTENCE_END = (".", "!", "?", "…", "。", "！", "？")


def caption(
    text: str,
    fps: float | None = None,
    motion_score: float | str | None = None,
    form: str = "rate",
    kind: Kind = "train",
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """`text` with what is known about rate and motion: `a cat` -> `a cat. 24 FPS, 4 motion score.`

    `fps`: frames per second as the model sees them, left out if None, NaN or 0; `motion_score`: left out if None, NaN
    or empty. Both are rounded to whole numbers, halves up, so 23.976 and 24 read alike. A text without a closing mark
    gets a full stop; one that already ends in such a suffix is returned as it is. Training and generation share this
    form.

    form: one of `FORMS`, or a family's (`SampleRules`). facts: what else it may tell, `source_fps` and `fps_max` in
    training and what the family's rules name.
    """
    known_fps = None if fps is None or not math.isfinite(fps) or fps <= 0 else fps
    return named(form, FORMS)(text, known_fps, _score(motion_score), kind, facts)


def _rate(text: str, known_fps: float | None, score: int | None, kind: Kind, facts: Mapping[str, Any]) -> str:
    text = text.strip()
    if _SUFFIX.search(text):
        return text
    if text and not text.endswith(_SENTENCE_END):
        text += "."
    parts = []
    if known_fps is not None:
        parts.append(f"{max(1, math.floor(known_fps + 0.5))} FPS")
    if score is not None:
        parts.append(f"{score} motion score")
    return " ".join(part for part in (text, ", ".join(parts) + "." if parts else "") if part)


def caption_end(text: str, marks: Sequence[str] = ()) -> str:
    """Return the rate, scores and `marks` at the end of a caption, which stay where it is cut: `24 FPS, 4 motion
    score.`"""
    start = len(text)
    while mark := next((mark for mark in marks if mark and text[:start].rstrip().endswith(mark)), None):
        start = len(text[:start].rstrip()) - len(mark)
    body = text[:start].rstrip()
    match = _END.search(body)
    return text[match.start() :] if match else text[start:]


def single_caption(cell: str) -> str:
    """Return the caption of a model that takes one text. Raises `ValueError` for a cell with several, as a
    story has."""
    parts = _listed(cell)
    if len(parts) == 1 and isinstance(parts[0], str):
        return readable_text(parts[0])
    if all(isinstance(part, str) for part in parts):
        raise ValueError(f"captions found: {len(parts)}, needed: 1")
    return cell


def captions_in(cell: str) -> tuple[str, ...]:
    """Return the captions that a cell holds: a JSON array of them, or one text. Raises `ValueError` for
    another array."""
    parts = _listed(cell)
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("its captions are not a JSON array of texts")
    return tuple(map(readable_text, parts))


def segment_captions(cell: str, needed: int) -> tuple[str, ...]:
    """Return the captions of a clip's segments. Raises `ValueError` for another number of them."""
    try:
        parts = captions_in(cell)
    except ValueError as error:
        raise ValueError(f"{error}; needed: {needed}, for a sample") from error
    if len(parts) != needed:
        raise ValueError(f"captions found: {len(parts)}, needed: {needed}, for a sample")
    return parts


def prefixed(text: str, prefix: str) -> str:
    """`a dog` with `ohwx, ` -> `ohwx, a dog`. One that begins with its words stays, whatever the blanks and commas
    behind them; of an empty one they are all. A prefix that ends in a letter or digit, `ohwx`, gets a comma."""
    bare = prefix.rstrip(" ,")
    if not text:
        return bare
    if text.startswith(bare) and not text[len(bare) :][:1].isalnum():
        return text
    glued = prefix[-1:].isascii() and prefix[-1:].isalnum()
    return f"{prefix}, {text}" if glued else prefix + text


def published_rate(rate: float, fps: float | None, fps_max: float | None) -> float:
    """Return a clip's rate under the ceiling as Open-Sora 2.0 writes it: an int unless it is the source's own, below
    that.

    `rate`: by `buckets.frame_interval`, 0 where unknown; `fps`: of the source.
    """
    below = fps_max is None or not rate or float(fps) < fps_max  # type: ignore[arg-type]
    return float(rate) if below and rate else int(rate)


def names_in(cell: str) -> list[str]:
    """Return the files that a cell names: one, or a JSON array of them. Raises `ClipError` for another array."""
    names = _listed(cell)
    if names == [""]:
        return []
    if not all(isinstance(name, str) and name for name in names):
        raise ClipError("the cell is not a JSON array of file names")
    return names


def read_frame_numbers(path: str | os.PathLike[str], lines: np.ndarray, width: int, header: int = 0) -> np.ndarray:
    """Return some lines of a text of numbers, separated by blanks or commas: float32 [len(lines), width].

    lines: int64, counted from the first behind the `header`. Raises `ClipError`.
    """
    try:
        text = read_small(Path(path)).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ClipError("no such file") from error
    except (OSError, ValueError) as error:
        raise ClipError(f"cannot be read as text ({error})") from error
    rows = text.splitlines()[header:]
    found = np.empty((len(lines), width), np.float32)
    for place, line in enumerate(lines.tolist()):
        if line >= len(rows):
            raise ClipError(f"line {line} was asked for, but the file has {len(rows)} for frames")
        numbers = rows[line].replace(",", " ").split()
        if len(numbers) != width:
            raise ClipError(f"line {line} has {len(numbers)} numbers; {width} are needed")
        try:
            found[place] = [float(number) for number in numbers]
        except ValueError as error:
            raise ClipError(f"line {line} holds something other than numbers") from error
    if not np.isfinite(found).all():
        raise ClipError("a number is not finite")
    return found


def _listed(cell: str) -> list[Any]:
    """Return the parts of a cell that is a JSON array, else the cell itself: a file, too, may have a name that begins
    so."""
    if cell.lstrip().startswith("["):
        with suppress(ValueError):
            return parse_json(cell) or [""]
    return [cell]


def _score(value: float | str | None) -> int | None:
    """Return a motion score rounded half up; None where there is none. Raises `ValueError` for a text that is no
    number."""
    if value is None or value == "":
        return None
    number = float(value)
    return math.floor(number + 0.5) if math.isfinite(number) else None


def _published(text: str, fps: float | None, score: int | None, kind: Kind, facts: Mapping[str, Any]) -> str:
    """Open-Sora 2.0's two forms: in training `a cat 24 FPS, 4 motion score.`, with the rate as stored, and only under a
    ceiling; in inference `a cat. 24 FPS. 4 motion score.`"""
    if kind == "inference":
        return _published_prompt(text, fps, score)
    if "fps_max" in facts:
        ceiling = facts["fps_max"]
        fps = (published_rate(fps or 0.0, facts["source_fps"], ceiling) or None) if ceiling else None
    parts = [] if fps is None else [f"{fps} FPS"]
    if score is not None:
        parts.append(f"{score} motion score")
    return f"{text} {', '.join(parts)}." if parts else text


def _published_prompt(text: str, fps: float | None, score: int | None) -> str:
    text = text.strip()
    if not text.endswith("."):
        text += "."
    if fps is not None and not _ENDS_IN_RATE.search(text):
        text += f" {fps} FPS."
    return text if score is None else f"{text} {score} motion score."


CaptionForm = Callable[[str, float | None, int | None, Kind, Mapping[str, Any]], str]  # as `caption`, all known

FORMS: Mapping[str, CaptionForm] = MappingProxyType(
    {"plain": lambda text, *_: text, "rate": _rate, "rate_as_published": _published}
)
