"""Control videos against their clips: rate, length and shape of the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from longtake.data.clips.captions import names_in
from longtake.data.clips.locations import is_url
from longtake.data.clips.video import ClipError
from longtake.data.probing.one_file import frames_at, probe_file
from longtake.data.rules import Companion
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable

_SAME_RATE = 0.01  # relative; 23.976 and 24 fps are counted alike
_SAME_ASPECT = 0.05  # relative; sizes are rounded to whole macroblocks
_MOST_ROWS, _SHOWN = 1000, 3  # that are checked before the first step, and named


def control_frames(path: str, table: ClipTable | MixedTable, row: int, numbers: np.ndarray) -> np.ndarray:
    """Return the frames of a control video that are shown when these frames of a clip are; equal numbers where a
    rate is unknown. Raises `ClipError` where it ends before, or shows a picture of another shape."""
    control = probe_file(path)
    height, width = int(table.height[row]), int(table.width[row])
    if abs(control.height * width / (control.width * height) - 1) > _SAME_ASPECT:
        raise ClipError(
            f"is {control.width} x {control.height}, another aspect ratio than the clip's {width} x {height}"
        )
    rate = float(table.fps[row])
    if not (rate > 0 and math.isfinite(rate) and control.fps > 0):
        return numbers
    is_same = abs(control.fps / rate - 1) <= _SAME_RATE
    matched = numbers if is_same else np.floor(numbers * (control.fps / rate) + 1e-3).astype(np.int64)
    if matched[-1] >= control.num_frames:
        lasts, needed = control.num_frames / control.fps, (numbers[-1] + 1) / rate
        raise ClipError(f"lasts {lasts:.3g} s, and the sample needs it until {needed:.3g} s")
    return frames_at(path, numbers / rate) if control.uneven_times else matched


def control_lines(table: ClipTable | MixedTable, companions: Sequence[Companion]) -> list[str]:
    """For the report before the first step: a warning where control videos do not fit their clips. Files on servers
    are not looked at; of a large table, rows evenly spread are."""
    rows = np.unique(np.linspace(0, len(table) - 1, min(len(table), _MOST_ROWS)).astype(np.int64)).tolist()
    lines = []
    for one in companions:
        faults = [fault for row in rows if one.kind == "video" and (fault := _fault(table, row, one))]
        if faults:
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            lines.append(
                f"warning: column {one.column}: {len(faults)} of {len(rows)} clips looked at have a control video "
                f"that does not fit, and samples beyond it are lost ({'; '.join(faults[:_SHOWN])}{more})"
            )
    return lines


def _fault(table: ClipTable | MixedTable, row: int, companion: Companion) -> str:
    """Return the fault of a clip's control video, with its name; empty where it has none, or is not on this machine."""
    name = next(iter(names_in(table.caption(row, companion.column))), "")
    location = table.location_of(row, name) if name and table.num_frames[row] > 0 else ""
    if not location or is_url(location):
        return ""
    try:
        control_frames(location, table, row, np.array([table.num_frames[row] - 1]))
    except ClipError as error:
        return f"{name}: {error}"
    return ""
