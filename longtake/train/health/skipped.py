"""Steps that are left out because their loss or gradient is not finite or far too large, and when that is too often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SkippedSteps:
    """Judges each step on the device, before its update, and again on the host, where it is written down.

    Both look at the same sums over all ranks (float32), so they agree, and so do all ranks.
    """

    norm_limit: float | None  # a gradient norm above it is abnormal; None: any finite one passes
    most_in_a_row: int
    total: int = 0  # of the whole run
    in_a_row: int = 0

    def judge(self, sums: Tensor) -> Tensor:
        """1 where the update must be left out, else 0: float32, 0-d, on the device.

        `sums`: as `Trainer.forward_backward` returns them.
        """
        bad = ~torch.isfinite(sums[:-1]).all()
        if self.norm_limit is not None:
            bad |= sums[-2] > self.norm_limit**2
        return bad.float()

    def take(self, losses: Sequence[float], square: float) -> bool:
        """Takes in a step whose slots had these losses and whose gradient's norm had this square; whether it counts."""
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
        """Whether the run must end."""
        return self.in_a_row > self.most_in_a_row
