from __future__ import annotations

import numpy as np
import pytest

from longtake.data.tables import ids
from longtake.data.tables.ids import compute_clip_ids, first_repeated, repeats
from longtake.random import hash64


def slow_ids(paths: list[str]) -> list[int]:
    seen: dict[str, int] = {}
    out = []
    for path in paths:
        out.append(hash64(path, seen.get(path, 0)))
        seen[path] = seen.get(path, 0) + 1
    return out


@pytest.mark.parametrize("at_once", [4, 1 << 22])
def test_ids_are_those_of_the_row_by_row_rule(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(ids, "_ROWS_AT_ONCE", at_once)
    random = np.random.default_rng(0)
    paths = [f"v/{number}{'é' * (number % 3)}.mp4" for number in random.integers(0, 40, 500).tolist()]
    paths += ["", "", "x" * 3000, "not utf-8: \udcff"]
    assert compute_clip_ids(paths).tolist() == slow_ids(paths)
    assert compute_clip_ids([]).tolist() == []


@pytest.mark.parametrize("at_once", [4, 1 << 22])
def test_repeats_are_counted_in_the_order_of_rows(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(ids, "_ROWS_AT_ONCE", at_once)
    values = np.array([7, 1, 7, 2, 1, 7, 2**64 - 1, 3, 2**64 - 1], np.uint64)
    rows, ordinals = repeats(values)
    assert rows.tolist() == [2, 4, 5, 8]
    assert ordinals.tolist() == [1, 1, 2, 1]
    assert first_repeated(values) == (0, 2, 7)
    assert first_repeated(np.unique(values)) is None
