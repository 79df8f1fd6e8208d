"""How fast and how long a video is by its frames' times, where the container's word does not agree with them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

_TOLERANCE = 0.01  # of the length: containers round rates and times, and their rates are then the better numbers
_TICKS = 2  # and this many ticks: both ends are rounded


@dataclass
class FrameTimes:
    """What the times of a video's frames tell, met one by one in any order."""

    count: int = 0
    first: int = 0  # ticks
    last: int = 0
    last_length: int = 0  # ticks that the last frame is shown; 0 where unknown
    known: bool = True  # every frame had a time

    def add(self, time: int | None, length: int | None) -> None:
        """Notes when a frame is shown and for how long, in ticks."""
        self.count += 1
        if time is None:
            self.known = False
            return
        if self.count == 1 or time < self.first:
            self.first = time
        if self.count == 1 or time >= self.last:
            self.last, self.last_length = time, length or 0


def mean_rate(times: FrameTimes, tick: Fraction, said: Fraction | None, guessed: Fraction | None = None) -> Fraction:
    """Frames a second: as the container has `said` where the times agree, else their mean; 0 where nothing is known.

    `tick`: seconds. A mean is known only as closely as times are rounded: within that, `guessed` is taken, or a whole
    number, or one over 1.001.
    """
    span = times.last - times.first
    if not times.known or times.count < 2 or span <= 0:
        return said or guessed or Fraction(0)
    steps = times.count - 1
    if said and abs(span * tick - steps / said) <= _TOLERANCE * span * tick + _TICKS * tick:
        return said
    mean = steps / (span * tick)
    low, high = steps / ((span + 1) * tick), steps / (max(span - 1, Fraction(1, 2)) * tick)
    whole = Fraction(round(mean))
    for rate in (guessed, whole, whole * 1000 / 1001):
        if rate and low <= rate <= high:
            return rate
    return mean


def length_of(times: FrameTimes, tick: Fraction, rate: Fraction, said: Fraction | None) -> Fraction:
    """Seconds: as the container has `said` where the times agree, else from the first frame to the last one's end.

    `rate`: as `mean_rate` gives it; the last frame is not taken to be shown longer than the mean one. 0 where nothing
    is known.
    """
    step = 1 / rate if rate else Fraction(0)
    if not times.known or times.count < 1:
        return said or times.count * step
    span = (times.last - times.first) * tick
    if times.count > 1 and span <= 0:
        return said or times.count * step
    last = times.last_length * tick
    measured = span + (last if 0 < last < step else step)
    if said and abs(said - measured) <= step + _TOLERANCE * measured + _TICKS * tick:
        return said
    return measured
