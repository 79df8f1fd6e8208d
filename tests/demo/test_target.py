"""The demo at its full size: what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.demo.start import run_demo
from longtake.track.progress import make_console


@pytest.mark.weekly
@pytest.mark.timeout(2400)
def test_the_demo_shows_what_its_prompts_say_in_every_row(tmp_path: Path) -> None:
    """The target is 95 % in every row (benchmarks/demo.py measures it). Kinds of processor round differently, so one
    run may miss it; what falls below these has lost something."""
    accuracy = run_demo(tmp_path / "demo", make_console()).accuracy
    assert accuracy["main"].count == 60
    for name, found in accuracy.items():
        assert found.colour >= 0.9, name
        if name != "stills":
            assert found.direction >= 0.85, name
            assert found.continuity >= 0.5, name
