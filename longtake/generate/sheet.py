"""A contact sheet: every video of a generation on one picture, under its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_TEXT_SIZE = 12
_LINE_HEIGHT = 15
_GAP, _MARGIN = 4, 12
_MAX_LINES = 3
_INK, _PAPER = (28, 35, 48), "white"


def contact_sheet(items: Sequence[tuple[str, np.ndarray]], num_frames: int = 6, cell: int = 96) -> Image.Image:
    """One strip for each (prompt, frames uint8 `[T, H, W, 3]`): up to `num_frames` frames evenly spaced in time.

    A strip stands under its prompt; a row holds `num_frames` pictures, so one long video or that many stills. Frames
    are scaled so that their longer side is `cell` pixels (nearest neighbour when enlarged), the prompt is cut where it
    needs more than three lines.
    """
    width = num_frames * (cell + _GAP) - _GAP
    rows: list[list[Image.Image]] = []
    for prompt, frames in items:
        strip = _strip(prompt, frames, num_frames, cell)
        if not rows or sum(s.width + _GAP for s in rows[-1]) + strip.width > width:
            rows.append([])
        rows[-1].append(strip)
    heights = [max(strip.height for strip in row) for row in rows]
    sheet = Image.new("RGB", (width + 2 * _MARGIN, sum(h + _MARGIN for h in heights) + _MARGIN), _PAPER)
    top = _MARGIN
    for row, height in zip(rows, heights, strict=True):
        left = _MARGIN
        for strip in row:
            sheet.paste(strip, (left, top))
            left += strip.width + _GAP
        top += height + _MARGIN
    return sheet


def _strip(prompt: str, frames: np.ndarray, num_frames: int, cell: int) -> Image.Image:
    picks = np.unique(np.linspace(0, len(frames) - 1, num_frames).round().astype(int))
    scale = cell / max(frames.shape[1:3])
    height, width = (max(1, round(side * scale)) for side in frames.shape[1:3])
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    total = len(picks) * (cell + _GAP) - _GAP
    lines = _wrapped(prompt, total)
    top = len(lines) * _LINE_HEIGHT + 2
    strip = Image.new("RGB", (total, top + height), _PAPER)
    for number, line in enumerate(lines):
        ImageDraw.Draw(strip).text((0, number * _LINE_HEIGHT), line, fill=_INK, font=_font())
    for column, pick in enumerate(picks):
        picture = Image.fromarray(frames[pick]).resize((width, height), resample)
        strip.paste(picture, (column * (cell + _GAP), top))
    return strip


def _wrapped(prompt: str, width: int) -> list[str]:
    """The prompt in up to three lines of at most `width` pixels; what does not fit ends in three dots."""
    lines = [""]
    for word in prompt.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if not lines[-1] or _font().getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    cut = lines[:_MAX_LINES]
    return [_shortened(line, width, number == _MAX_LINES - 1 < len(lines) - 1) for number, line in enumerate(cut)]


def _shortened(line: str, width: int, goes_on: bool) -> str:
    """A line cut to `width` pixels; with dots where it is cut, or where more follows."""
    text = line + ("..." if goes_on else "")
    while line and _font().getlength(text) > width:
        line = line[:-1]
        text = line + "..."
    return text


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's own font, so that a sheet looks the same on every machine."""
    return ImageFont.load_default(_TEXT_SIZE)
