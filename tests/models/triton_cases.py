"""Triton's kernels beside their formulas, in a process of its own: its interpreter must be chosen before Triton is
imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.precision import within

ROOT = Path(__file__).parents[2]


def assert_kernels_agree(module: str, count: int, most: Mapping[str, float]) -> None:
    """What `python -m tests.models.MODULE` prints of its `count` cases, whose names hold their dtype, is below `most`
    of that dtype: one error of each case, or one of each of its results."""
    command = [sys.executable, "-m", f"tests.models.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == count
    for case, found in cases.items():
        (limit,) = (most[dtype] for dtype in most if f"torch.{dtype}" in case.split())
        errors = found.values() if isinstance(found, dict) else [found]
        assert within(max(errors), limit), (case, found)
