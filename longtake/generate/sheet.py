"""A contact sheet: every video of a generation on one picture, with its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

_TEXT_HEIGHT = 14
_GAP = 4


def contact_sheet(items: Sequence[tuple[str, np.ndarray]], num_frames: int = 6, cell: int = 96) -> Image.Image:
    """One row for each (prompt, frames uint8 `[T, H, W, 3]`): up to `num_frames` frames evenly spaced, prompt above.

    Frames are scaled so that their longer side is `cell` pixels (nearest neighbour when enlarged).
    """
    rows = [_row(prompt, frames, num_frames, cell) for prompt, frames in items]
    sheet = Image.new("RGB", (max(r.width for r in rows), sum(r.height for r in rows)), "white")
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def _row(prompt: str, frames: np.ndarray, num_frames: int, cell: int) -> Image.Image:
    picks = np.unique(np.linspace(0, len(frames) - 1, num_frames).round().astype(int))
    height, width = frames.shape[1:3]
    scale = cell / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    row = Image.new("RGB", (num_frames * (cell + _GAP) + _GAP, size[1] + _TEXT_HEIGHT + 2 * _GAP), "white")
    ImageDraw.Draw(row).text((_GAP, 1), prompt, fill="black")
    for column, pick in enumerate(picks):
        picture = Image.fromarray(frames[pick]).resize(size, resample)
        row.paste(picture, (_GAP + column * (cell + _GAP), _TEXT_HEIGHT + _GAP))
    return row
