"""How many samples could not be loaded, and when that is too many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.contracts import UserError
from longtake.data import DatasetConfig, list_quarantine

_SHOWN = 5
_STATE_KEYS = ("tried", "lost")


@dataclass(frozen=True)
class LostSamples:
    """A tally over the whole run. It is made of numbers that every rank has, so no two ranks judge differently."""

    tried: int = 0  # samples of the steps made, fillers not counted
    lost: int = 0  # those of them that could not be loaded

    def add(self, tried: int, loaded: int) -> LostSamples:
        """The tally after one more step."""
        return LostSamples(self.tried + tried, self.lost + tried - loaded)

    def too_many(self, config: DatasetConfig) -> bool:
        """Whether more were lost than `dataset.max_bad` allows."""
        return self.lost > config.most_bad(self.tried)

    def to_json(self) -> dict[str, int]:
        """As a plain dict for `run.json`."""
        return {"tried": self.tried, "lost": self.lost}

    @classmethod
    def going_on(cls, state: Mapping[str, Any], num_quarantined: int) -> LostSamples:
        """The tally of a checkpoint's `run.json`; nothing where it kept none.

        What is lost is at most what is still quarantined: who mends clips and deletes their lines has fewer bad ones.
        (Lines written after the checkpoint do not count yet: their steps are made again.)
        """
        kept = state.get("samples", {})
        try:
            tried, lost = (int(kept.get(key, 0)) for key in _STATE_KEYS)
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"run.json: samples = {kept!r}: expected {' and '.join(_STATE_KEYS)}") from error
        return cls(tried, min(lost, num_quarantined))

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
