"""Bounds on rounding errors that follow from precision, for tests that compare floating-point results.

A bound that was read off one processor fails on the next, which adds in another order. Two sources of bounds do not:

- `apart(exact, result)`, twice the distance of a float32 result from the same computation in float64: two float32
  computations of one value, each that far from it, are at most that far from each other.
- `rounding(largest, steps)`, the unit in the last place of the largest value for each of the roundings in a row.

Both are multiplied by `MARGIN`: the distances of other processors differ by less than that. `tools/margins.py` measures
bound / error of every comparison under several instruction sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

MARGIN = 4.0


def apart(exact: Tensor, result: Tensor) -> float:
    """The largest distance allowed between `result` and another float32 computation of it; `exact` is in float64."""
    assert exact.dtype == torch.float64, "a float64 run that was rounded on the way bounds nothing"
    return MARGIN * 2 * float((result.double() - exact).abs().max())


def rounding(largest: float, steps: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """The largest distance allowed after `steps` roundings in a row of values up to `largest`."""
    return MARGIN * steps * torch.finfo(dtype).eps * largest


def within(error: Any, bound: Any, largest: float = 1.0) -> bool:
    """True where an error, or every one of a tensor of errors, is at most `bound`. `largest` is the size of the values
    compared, if the error is not a share of it.

    Tests write `assert within(error, bound)` and not `error <= bound` so that `tools/margins.py` sees the comparison.
    """
    return bool(torch.all(torch.as_tensor(error) <= torch.as_tensor(bound)))


@contextmanager
def in_float64(*modules: nn.Module) -> Iterator[None]:
    """Computes in float64, with the weights of `modules`, also what the code under test casts to float32."""
    for module in modules:
        module.double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        yield
