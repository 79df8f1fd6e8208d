"""Open-Sora 1.2's mask strategies: which latent frames of a video to be made are taken from which reference.

    strategy = group (";" group)*
    group    = clip ["," reference ["," start ["," target ["," length ["," edit ratio]]]]]      usually 0,0,0,0,1,0

`clip`: of a video of several clips, counted from 0. `reference`: which of the video's, counted from 0; left empty it
is the clip before. `start`: in the reference, `target`: in the clip, both in latent frames, below 0 from the end.
`edit ratio`: up to which share of the noise the frames are kept as they are; 0 keeps them to the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longtake.contracts import UserError

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBERS = "clip", "reference", "start", "target", "length"  # of a `MaskGroup`, in the order of a text
_FIELDS = (r"\s*\d+\s*", r"\s*\d*\s*", r"\s*[-+]?\d+\s*", r"\s*[-+]?\d+\s*", r"\s*\d+\s*", rf"\s*{_NUMBER}\s*")


def _group_pattern() -> str:
    pattern = ""
    for field in reversed(_FIELDS[1:]):
        pattern = f"(?:,{field}{pattern})?"
    return _FIELDS[0] + pattern


_GROUP = _group_pattern()
PATTERN = f"{_GROUP}(?:;{_GROUP})*"


@dataclass(frozen=True)
class MaskGroup:
    """One group of a strategy."""

    clip: int = 0
    reference: int | None = 0  # None: the clip before
    start: int = 0
    target: int = 0
    length: int = 1
    edit_ratio: float = 0.0

    def __str__(self) -> str:
        reference = "" if self.reference is None else self.reference
        return f"{self.clip},{reference},{self.start},{self.target},{self.length},{self.edit_ratio:g}"


def read_strategy(text: str) -> tuple[MaskGroup, ...]:
    """Return the groups of a strategy; none of an empty text. Raises `UserError` for a text that is none."""
    if not text.strip():
        return ()
    groups = []
    for part in text.split(";"):
        fields = [field.strip() for field in part.split(",")]
        if not re.fullmatch(_GROUP, part):
            raise UserError(
                f"mask strategy {text!r}: {part.strip()!r} is no group; write up to six numbers, as in "
                '"0,0,0,0,1,0" (clip, reference, start, target, length, edit ratio)'
            )
        numbers: list[int | None] = [int(field) if field else None for field in fields[:5]]
        ratio = float(fields[5]) if len(fields) == len(_FIELDS) else 0.0
        if ratio > 1:
            raise UserError(f"mask strategy {text!r}: an edit ratio of {ratio:g} is no share; choose 0 to 1")
        written: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=False))
        groups.append(MaskGroup(**written, edit_ratio=ratio))
    return tuple(groups)


def of_clip(strategy: str, clip: int) -> str:
    """What a strategy says of one clip, as that of a clip by itself."""
    mine = [group for group in read_strategy(strategy) if group.clip == clip]
    return ";".join(str(MaskGroup(0, *_rest(group))) for group in mine)


def carried(length: int, edit_ratio: float = 0.0) -> str:
    """Return the strategy of a clip that begins with the last latent frames of the one before."""
    return str(MaskGroup(reference=None, start=-length, length=length, edit_ratio=edit_ratio))


def _rest(group: MaskGroup) -> tuple[int | None, int, int, int, float]:
    return group.reference, group.start, group.target, group.length, group.edit_ratio


def nearest(value: int, step: int, most: int) -> int:
    """Return the multiple of `step` that a place snaps to, of those that a video of `most` frames has."""
    whole = value // step
    return (whole + (value % step > step / 2 and whole < most // step - 1)) * step


def placed(group: MaskGroup, frames: int, reference: int | None = None, align: int | None = None) -> MaskGroup | None:
    """Return a group with places counted from the beginning and a length that fits, in a clip of so many latent frames;
    None where nothing is left of it.

    reference: latent frames of the reference; None: as many as are asked for, and a start below 0 stays. align: places
    snap to multiples of it. Raises `UserError` for a target before the clip begins.
    """
    start, target = group.start, group.target + (frames if group.target < 0 else 0)
    if start < 0 and reference is not None:
        start = max(start + reference, 0)
    if align is not None:
        target = nearest(target, align, frames)
        start = start if reference is None else nearest(start, align, reference)
    if target < 0:
        raise UserError(f'mask strategy "{group}": the clip has {frames} latent frames; choose a target from {-frames}')
    left = [group.length, frames - target]
    left += [-start] if start < 0 else [] if reference is None else [reference - start]
    if (length := min(left)) < 1:
        return None
    return MaskGroup(group.clip, group.reference, start, target, length, group.edit_ratio)


def ratios(groups: Sequence[MaskGroup], frames: int) -> list[float]:
    """Up to which share of the noise each latent frame of a clip is kept; 1: it is made from the beginning."""
    found = [1.0] * frames
    for group in groups:
        found[group.target : group.target + group.length] = [group.edit_ratio] * group.length
    return found
