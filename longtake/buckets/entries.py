"""`bucket_config` as it is written down, its entries, and every fault in it.

    bucket_config = {"256px": {1: (1.0, 45), 33: (1.0, 12)}, "768px": {1: (0.5, 13), 33: ((0.5, 0.2), 2)}}

Resolution name -> number of frames (1 is a still) -> `(keep, batch size)` or `((keep, skip), batch size)`. `keep` is
the probability that a clip which fits the entry takes it; `skip` the probability that it tries the next shorter length
of the resolution instead; under a `law` (a key of `laws.LAWS`) whose `second` is "stay", of *not* trying it. With
`(0.0, None)` a length takes its clips from the shorter ones and trains on none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longtake.buckets.aspect import aspect_table, num_pixels
from longtake.buckets.laws import LAWS
from longtake.contracts import UserError

BucketConfig = Mapping[str, Mapping[int, tuple[float | tuple[float, float], int]]]


@dataclass(frozen=True)
class Entry:
    """One `frames: (keep, batch size)` of a resolution."""

    num_frames: int  # 1 is a still
    keep: float  # probability of taking a clip that fits
    skip: float | None  # probability of passing it on to the next shorter length; None where not given
    batch_size: int  # samples of one micro-batch

    @property
    def reachable(self) -> bool:
        """Whether any clip can ever take the entry."""
        return self.keep > 0 and (self.skip is None or self.skip < 1)


def bucket_config_faults(config: Any, divisor: int | None = None, law: str | None = None) -> list[str]:
    """Every fault of a `bucket_config`, one sentence each: place, value found, what would be right.

    With `divisor` (spatial compression x patch size) resolutions too small for it are found too. An empty list means
    that `BucketRule.from_config` will take it.
    """
    return _read(config, divisor, law)[1]


def read_entries(
    config: BucketConfig, divisor: int | None = None, law: str | None = None
) -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each resolution, in the order written. Raises UserError with the first fault and their
    number."""
    entries, faults = _read(config, divisor, law)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(faults[0] + more)
    return entries


def _read(config: Any, divisor: int | None, law: str | None) -> tuple[dict[str, tuple[Entry, ...]], list[str]]:
    if not isinstance(config, Mapping) or not config:
        example = '{"256px": {1: (1.0, 45), 33: (1.0, 12)}}'
        return {}, [f"bucket_config = {config!r}: at least one resolution is expected, as in {example}"]
    entries: dict[str, tuple[Entry, ...]] = {}
    faults: list[str] = []
    for name, lengths in config.items():
        try:
            num_pixels(name, law) if divisor is None else aspect_table(name, divisor, law=law)
        except UserError as error:
            faults.append(f"bucket_config.{name}: {error}")
        entries[name] = tuple(_read_resolution(lengths, f"bucket_config.{name}", faults, law))
    if not faults and not any(entry.reachable for of_name in entries.values() for entry in of_name):
        faults.append(
            "bucket_config: every entry has keep probability 0 or skip probability 1, so no clip would train; raise one"
        )
    return entries, faults


def _read_resolution(lengths: Any, place: str, faults: list[str], law: str | None) -> list[Entry]:
    if not isinstance(lengths, Mapping) or not lengths:
        faults.append(f"{place} = {lengths!r}: at least one length is expected, as in {{33: (1.0, 12)}}")
        return []
    entries: dict[int, Entry] = {}
    for key, value in lengths.items():
        num_frames = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not _is_whole(num_frames) or num_frames < 1:
            faults.append(f"{place}.{key}: a length is a whole number of frames, 1 for stills")
        elif num_frames in entries:
            faults.append(f"{place}.{key}: this length is given twice; keep one of the two")
        else:
            entry = _read_entry(num_frames, value, f"{place}.{key} = {value!r}", faults, law)
            if entry is not None:
                entries[num_frames] = entry
    return list(entries.values())


def _read_entry(num_frames: int, value: Any, place: str, faults: list[str], law: str | None) -> Entry | None:
    """One entry, or None and a fault."""
    if not _is_pair(value):
        faults.append(f"{place}: (keep probability, batch size) or ((keep, skip), batch size) is expected")
        return None
    keep, batch_size = value
    skip = None
    if _is_pair(keep):
        keep, skip = keep
        if LAWS[law].second == "stay" and _is_probability(skip):
            skip = 1 - skip
    if batch_size is None and keep == 0:
        batch_size = 1  # nothing is ever trained in it
    if not _is_probability(keep):
        faults.append(f"{place}: keep probability must lie in 0..1")
    elif skip is not None and not _is_probability(skip):
        faults.append(f"{place}: skip probability must lie in 0..1")
    elif skip is not None and num_frames == 1:
        faults.append(
            f"{place}: a still has no shorter length to skip to; give one probability, as in ({keep}, {batch_size})"
        )
    elif not _is_whole(batch_size) or batch_size < 1:
        faults.append(f"{place}: batch size must be a whole number of at least 1")
    else:
        return Entry(num_frames, float(keep), None if skip is None else float(skip), batch_size)
    return None


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
