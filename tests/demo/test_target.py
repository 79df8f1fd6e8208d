"""The demo at its full size: what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.demo import run_demo
from longtake.track import make_console


@pytest.mark.slow
def test_the_demo_learns_colours_and_directions(tmp_path: Path) -> None:
    """The target is 95 % (benchmarks/demo.py measures it); a run that falls below 90 % has lost something."""
    accuracy = run_demo(tmp_path / "demo", make_console()).accuracy
    assert accuracy["main"].count == 60
    assert accuracy["main"].colour >= 0.9
    assert accuracy["main"].direction >= 0.9
    assert accuracy["wide"].both >= 0.8
    assert accuracy["heldout"].both >= 0.6
