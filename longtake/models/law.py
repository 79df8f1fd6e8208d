"""Laws of what traces have counted: polynomials of sizes, fitted to a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

Sizes = tuple[int, ...]
_SMALL = (1 << 8, 1 << 18)  # bytes or FLOPs by which a law may always be off: best by few, for small tables by more

Numbers = Mapping[Any, Any]  # by name: a number, or several


class Law:
    """Numbers as polynomials of sizes: factors of the terms of each."""

    def __init__(
        self, like: Numbers, terms: Callable[[Sizes], Sequence[float]], factors: np.ndarray, holds: bool = True
    ) -> None:
        self._terms, self.factors = terms, factors
        self.holds = holds  # False: the terms do not give all that was measured
        ends = np.cumsum([np.size(of) for of in like.values()]).tolist()
        self._places = {
            name: slice(end - np.size(of), end) if np.ndim(of) else end - 1
            for (name, of), end in zip(like.items(), ends, strict=True)
        }

    def __call__(self, sizes: Sizes) -> dict[Any, Any]:
        """Return the numbers at these sizes, by name: a float, or an array where there are several."""
        numbers = np.array(self._terms(sizes), float) @ self.factors
        plain = numbers.tolist()
        return {name: (plain if isinstance(at, int) else numbers)[at] for name, at in self._places.items()}

    def predicts(self, sizes: Sizes, measured: Numbers, tolerance: float = 1e-4) -> bool:
        """Return whether the numbers at these sizes match the measured ones within a relative `tolerance`."""
        said, numbers = np.array(self._terms(sizes), float) @ self.factors, _flat(measured)
        return said.shape == numbers.shape and bool(_near(said, numbers, tolerance).all())


def fit(
    points: Sequence[Sizes],
    measure: Callable[[Sizes], Numbers],
    terms: Callable[[Sizes], Sequence[float]],
    least: int | None = None,
    tolerance: float = 1e-4,
) -> Law:
    """Return the law of what is measured at `points`: each number has as few of the terms, first ones first, as give it
    at all points, which are more than the terms; where none do, the first three that come nearest.

    `least`: points after which none more is measured where all numbers are given; default: all.
    """
    found: list[Numbers] = []
    table = np.array([terms(one) for one in points], float)
    apart = _apart(table)
    for point in points:
        found.append(measure(point))
        if len(found) < (least or len(points)):
            continue
        if len({len(_flat(numbers)) for numbers in found}) > 1:  # not even the same things happen at all points
            return Law(found[0], terms, np.zeros((table.shape[1], len(_flat(found[0])))), holds=False)
        rows = table[: len(found), apart]
        values = np.array([_flat(numbers) for numbers in found])
        factors, left = np.zeros((table.shape[1], values.shape[1])), np.ones(values.shape[1], bool)
        for small, count in (*product(_SMALL, range(1, min(len(found), len(apart) + 1))), (_SMALL[-1], 3)):
            own = rows[:, :count] / (scale := rows[:, :count].max(0))
            near = np.linalg.lstsq(own, values[:, left])[0] / scale[:, None]
            given = _near(rows[:, :count] @ near, values[:, left], tolerance, small).all(0)
            factors[:, left] = 0.0
            factors[np.ix_(apart[:count], left)] = near
            left[left] = ~given
            if not left.any():
                return Law(found[0], terms, factors)
    return Law(found[0], terms, factors, holds=False)


def _apart(table: np.ndarray) -> list[int]:
    """Return the terms, columns of a table of points, that say more than those before them."""
    apart: list[int] = []
    for i in range(table.shape[1]):
        columns = table[:, [*apart, i]]
        if np.linalg.matrix_rank(columns / columns.max(0)) > len(apart):
            apart.append(i)
    return apart


def _flat(numbers: Numbers) -> np.ndarray:
    return np.concatenate([np.ravel(of) for of in numbers.values()]).astype(float)


def _near(said: np.ndarray, measured: np.ndarray, tolerance: float, small: float = _SMALL[-1]) -> np.ndarray:
    return np.abs(said - measured) <= np.maximum(small, tolerance * measured)
