"""Sums of a step over all ranks, by name. One vector holds them, so that one reduction makes them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Results of one step, summed over ranks.

    values: float32 [2M + N + 3], M the most micro-batches of a step, N the nodes whose power is measured; on the host
    the same numbers as a list. Entries are views: what is written into them is in `values`.
    """

    values: Any
    num_micro_batches: int  # M

    @classmethod
    def zeros(cls, num_micro_batches: int, num_nodes: int, device: torch.device) -> StepSums:
        return cls(torch.zeros(2 * num_micro_batches + num_nodes + 3, device=device), num_micro_batches)

    def on_host(self, values: list[float]) -> StepSums:
        """Return the same sums as `values`, the numbers read from the device."""
        return StepSums(values, self.num_micro_batches)

    @property
    def losses(self) -> Any:
        """[M]: sum of weight times loss over the samples of a micro-batch, divided by its batch size; 0 beyond the
        step's micro-batches."""
        return self.values[: self.num_micro_batches]

    @property
    def shares(self) -> Any:
        """[M]: samples of a micro-batch that were loaded, divided by its batch size; a full one has 1."""
        return self.values[self.num_micro_batches : 2 * self.num_micro_batches]

    @property
    def watts(self) -> Any:
        """[N]: mean draw of a GPU of each node; 0 but every few steps."""
        return self.values[2 * self.num_micro_batches : -3]

    @property
    def loaded(self) -> Any:
        """Samples of the step that were loaded."""
        return self.values[-3]

    @property
    def grad_square(self) -> Any:
        """Square of the gradient's norm."""
        return self.values[-2]

    @property
    def flags(self) -> Any:
        """Requests to the ranks, see `StopRequest.flags`."""
        return self.values[-1]

    def are_finite(self) -> Tensor:
        """Return True where every sum but the flags is finite: bool, 0-d, on the device."""
        return torch.isfinite(self.values[:-1]).all()
