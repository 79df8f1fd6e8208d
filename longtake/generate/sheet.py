"""A contact sheet: frames of every video of a generation in one image, under their prompts."""

from __future__ import annotations

import textwrap
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

    A row holds `num_frames` images: one long video or that many stills. The longer side of a frame is scaled to `cell`
    pixels (nearest neighbour when enlarged); a prompt is cut after three lines.
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
    columns = int(total / _font().getlength("n"))  # letters are narrower than this one on the average
    lines = textwrap.wrap(prompt, columns, max_lines=_MAX_LINES, placeholder="...") or [""]
    top = len(lines) * _LINE_HEIGHT + 2
    strip = Image.new("RGB", (total, top + height), _PAPER)
    for number, line in enumerate(lines):
        ImageDraw.Draw(strip).text((0, number * _LINE_HEIGHT), line, fill=_INK, font=_font())
    for column, pick in enumerate(picks):
        picture = Image.fromarray(frames[pick]).resize((width, height), resample)
        strip.paste(picture, (column * (cell + _GAP), top))
    return strip


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's own font, so that a sheet looks the same on every machine."""
    return ImageFont.load_default(_TEXT_SIZE)
