"""Health monitors of a run, as one record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from longtake.train.health.goodput import Stopwatch
from longtake.train.health.interrupt import FirstStepTimer
from longtake.train.health.left_out import LostSamples, SkippedSteps
from longtake.train.health.watchdog import Watchdog


@dataclass
class Health:
    """The parts of one run."""

    first_step: FirstStepTimer
    watchdog: Watchdog
    stopwatch: Stopwatch
    skipped: SkippedSteps
    lost: LostSamples

    def kept(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores of them, as fields of `RunState`."""
        return {"skipped_steps": self.skipped.total, "seconds": asdict(self.stopwatch.seconds), "samples": self.lost}
