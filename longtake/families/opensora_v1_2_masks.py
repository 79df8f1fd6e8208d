"""Which latent frames of a training clip are given, as Open-Sora 1.2 draws them: bool [F], True where frames are made.

Two differences: the quarters of 2 or 3 latent frames, for which that program ends with an error, are one frame, and a
mask that would give all frames leaves the last to be made, whatever its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from longtake.families.opensora_v1_2_kinds import NOTHING
from longtake.random import Numbers

_LEAST, _SPREAD = 0.1, 0.8  # share of frames that are given under `random`: from the first on, so much more


def _quarter(numbers: Numbers, frames: int) -> int:
    return numbers.integer(1, max(frames // 4, 1) + 1)


def _one(numbers: Numbers, frames: int) -> int:
    return 1


def _at_ends(length: Callable[[Numbers, int], int], head: bool, tail: bool) -> Callable[[Numbers, int], np.ndarray]:
    def mask(numbers: Numbers, frames: int) -> np.ndarray:
        given, place = length(numbers, frames), np.arange(frames)
        return ~((head & (place < given)) | (tail & (place >= frames - given)))

    return mask


def _anywhere(length: Callable[[Numbers, int], int]) -> Callable[[Numbers, int], np.ndarray]:
    def mask(numbers: Numbers, frames: int) -> np.ndarray:
        given, place = length(numbers, frames), np.arange(frames)
        start = numbers.integer(0, frames - given + 1)
        return (place < start) | (place >= start + given)

    return mask


def _interpolate(numbers: Numbers, frames: int) -> np.ndarray:
    return np.arange(frames) % 2 != numbers.integer(0, 2)


def _random(numbers: Numbers, frames: int) -> np.ndarray:
    ratio = _LEAST + _SPREAD * numbers.share()
    return np.array([numbers.share() for _ in range(frames)], np.float32) > np.float32(ratio)


MASKS: Mapping[str, Callable[[Numbers, int], np.ndarray]] = MappingProxyType(
    {
        "random": _random,
        "interpolate": _interpolate,
        "quarter_random": _anywhere(_quarter),
        "quarter_head": _at_ends(_quarter, True, False),
        "quarter_tail": _at_ends(_quarter, False, True),
        "quarter_head_tail": _at_ends(_quarter, True, True),
        "image_random": _anywhere(_one),
        "image_head": _at_ends(_one, True, False),
        "image_tail": _at_ends(_one, False, True),
        "image_head_tail": _at_ends(_one, True, True),
    }
)


def to_make(kind: str, numbers: Numbers, frames: int) -> np.ndarray:
    """Return the mask of a kind for a clip of so many latent frames: bool [F]. A still is made whole."""
    if kind == NOTHING or frames == 1:
        return np.ones(frames, bool)
    mask = MASKS[kind](numbers, frames)
    mask[-1] |= not mask.any()
    return mask
