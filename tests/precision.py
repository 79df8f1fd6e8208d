"""Bounds on rounding errors that follow from precision, for tests that compare floating-point results.

A bound that was read off one processor fails on the next, which adds in another order. Two kinds of bounds do not:

- `apart(exact, result)`: from the distance of a float32 result to the same computation in float64;
- `rounding(largest, steps)`: the unit in the last place of the largest value, for each of the roundings in a row.

`tools/margins.py` measures bound / error of every comparison under several instruction sets: at least `MARGIN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from longtake.encoders.autoencoder import Autoencoder
    from longtake.system.build import System

MARGIN = 4.0


def apart(exact: Tensor, result: Tensor) -> float:
    """The largest distance allowed between `result` and another float32 computation of it; `exact` is in float64.

    Sums in another order may be twice as far from `exact` as those of `result`, on the other side.
    """
    assert exact.dtype == torch.float64, "a float64 run that was rounded on the way bounds nothing"
    distance = float((result.detach().double() - exact.detach()).abs().max())
    return MARGIN * 3 * max(distance, torch.finfo(torch.float32).eps * float(exact.detach().abs().max()))


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
    """Compute in float64 with the weights of `modules`: what the code under test casts to float32 stays as it is.

    What is float32 from the start, such as times and their features, is the same in a float32 run: its rounding is no
    part of the distance between two of them. The weights are float32 before and after.
    """
    for module in modules:
        assert {tensor.dtype for tensor in module.state_dict().values() if tensor.is_floating_point()} <= {
            torch.float32
        }
        module.double()
    cast = Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda tensor: tensor if tensor.dtype == torch.float64 else cast(tensor))
        yield
    for module in modules:
        module.float()


@contextmanager
def autoencoder_in_float64(autoencoder: Autoencoder) -> Iterator[None]:
    """`in_float64` for a learned autoencoder."""
    dtype = autoencoder.dtype
    autoencoder.dtype = torch.float64
    with in_float64(autoencoder.model):
        yield
    autoencoder.dtype = dtype


@contextmanager
def system_in_float64(system: System) -> Iterator[None]:
    """`in_float64` for all that makes a video."""
    texts = (getattr(encoder, "module", None) for encoder in system.encoders.of_captions.values())
    modules = [system.denoiser, *(module for module in texts if module is not None)]
    is_learned = hasattr(system.autoencoder, "model")
    with in_float64(*modules), autoencoder_in_float64(system.autoencoder) if is_learned else nullcontext():
        yield
