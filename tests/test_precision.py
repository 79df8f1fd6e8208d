"""Bounds on errors: derived from precision, seen by `tools/margins.py`, and never of seconds."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import margins, precision

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}
SMALL = 1e-2  # what a share or a unit is compared with is larger


def assertions() -> Iterator[tuple[str, ast.Compare]]:
    """Every comparison in an `assert` of a test, with its place."""
    for file in sorted(TESTS.rglob("*.py")):
        if {"kept", "golden"}.isdisjoint(file.parts):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Assert):
                    for part in ast.walk(node.test):
                        if isinstance(part, ast.Compare):
                            yield f"{file.relative_to(TESTS)}:{part.lineno}", part


def test_small_bounds_compared_by_hand_are_absent() -> None:
    by_hand = []
    for place, comparison in assertions():
        sides = [comparison.left, *comparison.comparators]
        for operator, less, more in zip(comparison.ops, sides, sides[1:], strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                less, more = more, less
            ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if ordered and not isinstance(less, ast.Constant) and any(map(is_small, ast.walk(more))):
                by_hand.append(place)
    assert by_hand == [], "compare with tests.precision.within"


def is_small(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < abs(node.value) <= SMALL


def test_assertions_on_elapsed_time_are_absent() -> None:
    timed = [
        place
        for place, comparison in assertions()
        for part in ast.walk(comparison)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and any(map(reads_clock, ast.walk(part)))
    ]
    assert timed == [], "count, or wait for an event"


def reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def test_recorder_of_each_kind_of_comparison_writes_error_and_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(margins.VARIABLE, str(tmp_path))
    scalar = type(pytest.approx(1.0))
    hooked = ((torch.testing, "assert_close"), (torch, "allclose"), (np.testing, "assert_allclose"))
    for owner, name in (*hooked, (precision, "within"), (scalar, "__eq__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    margins.install()
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    torch.testing.assert_close({"x": [first]}, {"x": [second]}, rtol=0, atol=4.0)
    torch.allclose(first, second, rtol=0.0, atol=2.0)
    np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=0, atol=1.0)
    assert {"x": pytest.approx([1.0, 2.5], abs=5.0)} == {"x": [1.0, 2.0]}
    assert precision.within(torch.tensor([0.1, 0.5]), 10.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first, second)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    used = {line["site"]: (line["error"], line["bound"]) for line in lines}
    assert list(used.values()) == [(0.5, 4.0), (0.5, 2.0), (0.5, 1.0), (0.5, 5.0), (0.5, 10.0)]
    assert all(
        line["test"].endswith("::test_recorder_of_each_kind_of_comparison_writes_error_and_bound") for line in lines
    )


def test_bound_of_a_float64_run_accepts_reordered_sums_and_rejects_bf16() -> None:
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 1000, generator=random), torch.randn(1000, 8, generator=random)
    product = a @ b
    bound = precision.apart(a.double() @ b.double(), product)
    in_parts = sum(a[:, i : i + 10] @ b[i : i + 10] for i in range(0, 1000, 10))
    assert precision.within((in_parts - product).abs().max(), bound)
    rounded = a.bfloat16().float() @ b
    assert not precision.within((rounded - product).abs().max(), bound)
