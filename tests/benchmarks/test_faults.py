"""The faults that `benchmarks/faults.py` plants can be planted: the table follows the code and the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_fault_has_its_place_in_the_code_and_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import fault_table

    assert fault_table.check(ROOT) == []
    names = [fault.name for fault in fault_table.FAULTS]
    assert len(names) == len(set(names)) >= 30
    for fault in fault_table.FAULTS:
        for edit in fault.edits:
            path = fault_table.place_of(ROOT, edit)
            compile(path.read_text(encoding="utf-8").replace(edit.old, edit.new), path.name, "exec")
