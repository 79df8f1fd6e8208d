"""How many samples could not be loaded, and when that is too many."""

from __future__ import annotations

from pathlib import Path

from longtake.checkpoint import Samples
from longtake.contracts import UserError
from longtake.data import DatasetConfig, list_quarantine

_SHOWN = 5


class LostSamples(Samples):
    """A tally that judges. It is made of numbers that every rank has, so no two ranks judge differently."""

    def add(self, tried: int, loaded: int) -> LostSamples:
        """The tally after one more step."""
        return LostSamples(self.tried + tried, self.lost + tried - loaded)

    def too_many(self, config: DatasetConfig) -> bool:
        """Whether more were lost than `dataset.max_bad` allows."""
        return self.lost > config.most_bad(self.tried)

    @classmethod
    def going_on(cls, kept: Samples, num_quarantined: int) -> LostSamples:
        """The tally that a checkpoint kept.

        What is lost is at most what is still quarantined: mended clips whose lines were deleted count no more.
        (Lines written after the checkpoint do not count yet: their steps are made again.)
        """
        return cls(kept.tried, min(kept.lost, num_quarantined))

    def refusal(self, config: DatasetConfig, quarantine: Path) -> UserError:
        """The error that ends the run: how many, the first of them, where the rest is, what can be done."""
        found = list_quarantine(quarantine)
        clips = "; ".join(f"{fault.path}: {fault.reason}" for fault in found[:_SHOWN])
        rest = f"; {len(found) - _SHOWN} more in {quarantine}" if len(found) > _SHOWN else f"; listed in {quarantine}"
        return UserError(
            f"dataset.max_bad = {config.max_bad}: {self.lost} of the {self.tried} samples tried so far could not be "
            f"loaded ({clips}{rest}); mend the clips and delete their lines there, or raise dataset.max_bad, and "
            "continue the run"
        )
