"""The text a model reads: the caption with its frame rate and motion score, made alike for training and generation."""

from __future__ import annotations

import math
import re
from typing import Literal

Compat = Literal["opensora_v2"]
Kind = Literal["train", "inference"]

_SUFFIX = re.compile(r"(^|[.!?…。！？] )(\d+ FPS|\d+ FPS, \d+ motion score|\d+ motion score)\.$")
_SENTENCE_END = (".", "!", "?", "…", "。", "！", "？")


def caption(
    text: str,
    fps: float | None = None,
    motion_score: float | str | None = None,
    compat: Compat | None = None,
    kind: Kind = "train",
) -> str:
    """`text` with what is known about rate and motion: `a cat` -> `a cat. 24 FPS, 4 motion score.`

    `fps`: frames per second as the model sees them, left out if None, NaN or 0; `motion_score`: left out if None, NaN
    or empty. Both are rounded to whole numbers, halves up, so 23.976 and 24 read alike. A text without a closing mark
    gets a full stop; one that already ends in such a suffix is returned as it is. Training and generation share this
    form.

    `compat="opensora_v2"` gives that program's two forms, `kind` chooses which: in training `a cat 24 FPS, 4 motion
    score.`, with the rate as stored; in inference `a cat. 24 FPS. 4 motion score.`
    """
    known_fps = None if fps is None or not math.isfinite(fps) or fps <= 0 else fps
    score = _score(motion_score)
    if compat == "opensora_v2":
        return _opensora_train(text, known_fps, score) if kind == "train" else _opensora_prompt(text, known_fps, score)
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


def _score(value: float | str | None) -> int | None:
    """A motion score rounded half up; None where there is none. Raises `ValueError` for a text that is no number."""
    if value is None or value == "":
        return None
    number = float(value)
    return math.floor(number + 0.5) if math.isfinite(number) else None


def _opensora_train(text: str, fps: float | None, score: int | None) -> str:
    parts = [] if fps is None else [f"{fps} FPS"]
    if score is not None:
        parts.append(f"{score} motion score")
    return f"{text} {', '.join(parts)}." if parts else text


def _opensora_prompt(text: str, fps: float | None, score: int | None) -> str:
    text = text.strip()
    if not text.endswith("."):
        text += "."
    if fps is not None and "FPS." not in text:
        text += f" {fps} FPS."
    return text if score is None else f"{text} {score} motion score."
