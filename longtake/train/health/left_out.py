"""Skipped samples and steps, and their limits: samples that cannot be loaded, steps whose loss or gradient is not
finite or far too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longtake.checkpoint.state import Samples
from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.loading.quarantine import list_quarantine
from longtake.train.sums import StepSums

_SHOWN = 5


class LostSamples(Samples):
    """A tally that judges. It is made of numbers that every rank has, so no two ranks judge differently."""

    def add(self, tried: int, loaded: int) -> LostSamples:
        """Return the tally after one more step."""
        return LostSamples(self.tried + tried, self.lost + tried - loaded)

    def too_many(self, config: DatasetConfig) -> bool:
        """Return whether more were lost than `dataset.max_bad` allows."""
        return self.lost > config.most_bad(self.tried)

    @classmethod
    def going_on(cls, kept: Samples, num_quarantined: int) -> LostSamples:
        """Return the tally that a checkpoint kept.

        What is lost is at most what is still quarantined: mended clips whose lines were deleted count no more.
        (Lines written after the checkpoint do not count yet: their steps are made again.)
        """
        return cls(kept.tried, min(kept.lost, num_quarantined))

    def refusal(self, config: DatasetConfig, quarantine: Path) -> UserError:
        """Return the error that ends the run: how many, the first of them, where the rest is, what can be done."""
        found = list_quarantine(quarantine)
        clips = "; ".join(f"{fault.path}: {fault.reason}" for fault in found[:_SHOWN])
        rest = f"; {len(found) - _SHOWN} more in {quarantine}" if len(found) > _SHOWN else f"; listed in {quarantine}"
        return UserError(
            f"dataset.max_bad = {config.max_bad}: {self.lost} of the {self.tried} samples tried so far could not be "
            f"loaded ({clips}{rest}); mend the clips and delete their lines there, or raise dataset.max_bad, and "
            "continue the run"
        )


@dataclass
class SkippedSteps:
    """Judges each step on the device, before its update, and again on the host, where it is written down.

    Both look at the same sums over all ranks (float32), so they agree, and so do all ranks.
    """

    norm_limit: float | None  # a gradient norm above it is abnormal; None: any finite one passes
    most_in_a_row: int
    total: int = 0  # of the whole run
    in_a_row: int = 0

    def judge(self, sums: StepSums) -> Tensor:
        """1 where the update must be left out, else 0: float32, 0-d, on the device."""
        bad = ~sums.are_finite()
        if self.norm_limit is not None:
            bad |= sums.grad_square > self.norm_limit**2
        return bad.float()

    def take(self, losses: Sequence[float], square: float) -> bool:
        """Take in a step whose slots had these losses and whose gradient's norm had this square; whether it counts."""
        finite = all(math.isfinite(loss) for loss in losses) and math.isfinite(square)
        limit = math.inf if self.norm_limit is None else float(torch.tensor(self.norm_limit**2, dtype=torch.float32))
        if finite and square <= limit:
            self.in_a_row = 0
            return True
        self.total += 1
        self.in_a_row += 1
        return False

    @property
    def too_many(self) -> bool:
        """True if the run must end."""
        return self.in_a_row > self.most_in_a_row
