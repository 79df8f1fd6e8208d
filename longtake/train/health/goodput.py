"""Accounting of a run's seconds: steps that count, starting, saving, waiting, and repeated steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from longtake.durable import write_whole
from longtake.small_files import parse_json, read_small

FILE = "goodput.json"


@dataclass
class Seconds:
    """Seconds of the whole run, over all its launches, as rank 0 sees them."""

    steps: float = 0.0  # in steps that are part of the run
    start: float = 0.0  # from a launch, or the death of the one before it under torchrun, to its first step
    again: float = 0.0  # in steps after the last checkpoint of a launch that died: they were made again
    save: float = 0.0  # the run stood still for a checkpoint
    wait: float = 0.0  # for data
    skipped: float = 0.0  # in steps that were left out
    validate: float = 0.0  # the run made videos of itself

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count: 0 to 1."""
        total = sum(asdict(self).values())
        return self.steps / total if total else 1.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seconds:
        """Back from a file; what is missing in it is 0."""
        return cls(**{field.name: float(data.get(field.name, 0.0)) for field in fields(cls)})

    def __str__(self) -> str:
        return (
            f"{self.goodput:.1%} of the time was spent training (goodput): {self.steps:.0f} s in steps that count, "
            f"{self.start:.0f} s starting, "
            f"{self.again:.0f} s made again, {self.save:.0f} s saving, {self.wait:.0f} s waiting for data, "
            f"{self.skipped:.0f} s in steps left out"
        ) + (f", {self.validate:.0f} s in validations" if self.validate else "")


class Stopwatch:
    """Counts the seconds of this launch on top of the earlier ones, and keeps them in the run's folder on rank 0.

    `kept`: those of the checkpoint that the run resumes from. What earlier launches counted after it is in the file.
    """

    def __init__(self, folder: Path, kept: Mapping[str, Any], launched: float, restarted: bool, enabled: bool) -> None:
        """Start counting. `launched`: `time.time()` at the start of the launch; `restarted`: by the launcher of the
        previous one."""
        self._path, self._enabled = folder / FILE, enabled
        before = _read(self._path) if enabled else {}
        self.seconds = Seconds.from_json(before or kept)
        counted = Seconds.from_json(kept).steps
        self.seconds.again += max(0.0, self.seconds.steps - counted)
        self.seconds.steps = min(self.seconds.steps, counted)
        since = min(launched, float(before["time"])) if restarted and "time" in before else launched
        self._mark, self._since = time.perf_counter(), since
        self._started, self._stood = False, 0.0

    def first_step(self) -> None:
        """Record that the first step of the launch is done."""
        self.seconds.start += max(0.0, time.time() - self._since)
        self._started, self._mark, self._stood = True, time.perf_counter(), 0.0

    def step(self, wait_seconds: float, counts: bool = True) -> None:
        """Record a further step; `counts`: it was not skipped."""
        if not self._started:
            return self.first_step()
        now = time.perf_counter()
        spent = max(0.0, now - self._mark - self._stood)
        wait = min(wait_seconds, spent)
        self.seconds.wait += wait
        if counts:
            self.seconds.steps += spent - wait
        else:
            self.seconds.skipped += spent - wait
        self._mark, self._stood = now, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Yield the run stands still for a checkpoint in the body."""
        with self._standing_still("save"):
            yield

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Yield the run makes videos in the body."""
        with self._standing_still("validate"):
            yield

    @contextmanager
    def _standing_still(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            setattr(self.seconds, part, getattr(self.seconds, part) + spent)
            self._stood += spent

    def write(self) -> None:
        """Put the seconds so far into `goodput.json`."""
        if not self._enabled:
            return
        content = asdict(self.seconds) | {"goodput": self.seconds.goodput, "time": time.time()}
        write_whole(self._path, json.dumps(content, indent=1) + "\n", synced=False)


def read_seconds(folder: Path) -> Seconds:
    """Read the seconds stored in a run's folder; none where there is no file."""
    return Seconds.from_json(_read(folder / FILE))


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = parse_json(read_small(path))
        if isinstance(content, dict) and all(isinstance(value, (int, float)) for value in content.values()):
            return content
    return {}  # none yet, or damaged: only the count of seconds is lost
