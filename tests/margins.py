"""Record bound / error of every comparison with a tolerance, for `tools/margins.py`.

`LONGTAKE_MARGINS=FOLDER` installs the hooks in every process that imports `tests`: forked and spawned ranks too. Each
process appends to a file of its own, in which a later line of a comparison has a larger error than the earlier ones.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._comparison import get_tolerances

from tests import precision

VARIABLE = "LONGTAKE_MARGINS"
BF16 = "LONGTAKE_MARGINS_BF16"  # "0": a processor without instructions for bfloat16, which no library can be told
TESTS = Path(__file__).parent
_NOT_SITES = {__file__, precision.__file__}
_used: dict[tuple[str, str], float] = {}  # largest error / bound so far, by test and site


def install() -> None:
    if os.environ.get(BF16) == "0":
        torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.testing.assert_close = _seen(torch.testing.assert_close, _record_close)
    torch.allclose = _seen(torch.allclose, _record_allclose)
    np.testing.assert_allclose = _seen(np.testing.assert_allclose, _record_numpy)
    precision.within = _seen(precision.within, _record_within)
    scalar = type(pytest.approx(1.0))  # those of sequences and mappings compare by it
    scalar.__eq__ = _approx_equal(scalar.__eq__)


def _seen(compare: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    """The comparison, recorded when it holds: one that fails ends its test or was expected to fail."""

    @functools.wraps(compare)
    def compared(*args: Any, **options: Any) -> Any:
        holds = compare(*args, **options)
        if holds is not False:
            record(*args, **options)
        return holds

    return compared


def _approx_equal(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compared(self: Any, actual: Any) -> bool:
        holds = equal(self, actual)
        numbers = (int, float, complex, np.number)
        if holds and isinstance(actual, numbers) and isinstance(self.expected, numbers) and actual == actual:
            share = self.tolerance / abs(self.expected) if self.expected else 1.0
            _record(abs(actual - self.expected), self.tolerance, share)
        return holds

    return compared


def _record_close(actual: Any, expected: Any, *, rtol: Any = None, atol: Any = None, **options: Any) -> None:
    if isinstance(expected, Mapping):
        for key, value in expected.items():
            _record_close(actual[key], value, rtol=rtol, atol=atol)
    elif isinstance(expected, Sequence):
        for ours, theirs in zip(actual, expected, strict=True):
            _record_close(ours, theirs, rtol=rtol, atol=atol)
    elif expected is not None:
        actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
        rtol, atol = get_tolerances(actual, expected, rtol=rtol, atol=atol)
        _record_tensors(actual, expected, rtol, atol)


def _record_allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> None:
    _record_tensors(input, other, rtol, atol)


def _record_numpy(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, *args: Any, **options: Any) -> None:
    _record_tensors(torch.as_tensor(np.asarray(actual)), torch.as_tensor(np.asarray(desired)), rtol, atol)


def _record_tensors(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    if expected.is_meta or not expected.numel() or not (rtol or atol):
        return
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    actual, expected = (tensor.detach().to("cpu", wide) for tensor in (actual, expected))
    error, size = torch.broadcast_tensors((actual - expected).abs(), expected.abs())
    regular = torch.isfinite(error)
    if not regular.any():
        return
    error, bound = error[regular], (atol + rtol * size)[regular]
    worst = int(torch.where(error == 0, 0, error / bound).argmax())
    largest = float(size[regular].max())
    _record(error[worst], bound[worst], max(rtol, atol / largest) if largest else 1.0)


def _record_within(error: Any, bound: Any, largest: float = 1.0) -> None:
    _record(error, bound, float(torch.as_tensor(bound, dtype=torch.float64).max()) / largest)


def _record(error: Any, bound: Any, share: float) -> None:
    """`share`: the bound as a share of the values compared."""
    error, bound = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in (error, bound)))
    used = torch.where(error <= 0, 0.0, error / bound).flatten()
    if not used.numel():
        return
    worst = int(used.argmax())
    key = (os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0], _site())
    if float(used[worst]) <= _used.get(key, -1.0):
        return
    _used[key] = float(used[worst])
    line = {"test": key[0], "site": key[1], "used": _used[key], "error": float(error.flatten()[worst])}
    line |= {"bound": float(bound.flatten()[worst]), "share": share}
    with (Path(os.environ[VARIABLE]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _site() -> str:
    """File and line of the innermost frame that is a test's."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _NOT_SITES and name.startswith(f"{TESTS}{os.sep}"):
            return f"{Path(name).relative_to(TESTS.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
