"""The benchmark of a step runs at its smallest size, on a CPU, without diffusers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


def run(target: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What the program printed, and the figures it wrote."""
    program = ("-m", "tests.benchmarks.program", "step")
    done = forks.run([sys.executable, *program, "--tiny", "--json", target, *words], timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(target.read_text())["figures"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "remat"), [("flux", ("1", "1")), ("cogvideox-5b", ("1",))])
def test_a_step_is_timed_in_its_phases(tmp_path: Path, model: str, remat: tuple[str, ...]) -> None:
    own = ("--model", model, "--remat", *remat)
    said, figures = run(tmp_path / "step.json", "--no-peer", "--device", "cpu", *own)
    assert "forward ms" in said
    for line in figures["runs"]:
        assert set(line["phases_ms"]) == {"data", "encode", "forward", "backward", "optimizer"}
        assert min(line["phases_ms"].values()) > 0
        assert line["tokens_per_second"] > 0
        assert line["forecast_bytes"] > 0


@pytest.mark.slow
def test_the_overhead_of_the_trainer_is_told_by_part(tmp_path: Path) -> None:
    said, figures = run(tmp_path / "overhead.json", "--overhead")
    assert "target: overhead <= 2%" in said
    assert 0 < figures["overhead_without_optimizer"] < figures["overhead"] < 1
    assert figures["steps"] >= 4
