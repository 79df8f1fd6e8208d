"""The benchmarks of saving, restarting and killing run at their smallest sizes."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


def run(name: str, target: Path, *words: str) -> dict[str, Any]:
    """The figures that a program wrote; it ended well."""
    done = forks.run([sys.executable, "-m", "tests.benchmarks.program", name, *words, "--json", target])
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text())["figures"]


def test_the_stall_of_a_save_is_measured(tmp_path: Path) -> None:
    figures = run("checkpoint", tmp_path / "out.json", "--tiny", "--saves", "2")
    assert 0 < figures["stall_seconds"] < figures["complete_seconds"]


@pytest.mark.slow
def test_restarts_are_measured_at_several_positions(tmp_path: Path) -> None:
    figures = run("resume", tmp_path / "out.json", "--tiny")
    found = {(line["kept"], line["share"]) for line in figures["runs"]}
    assert found == set(product((True, False), (0.0, 0.25, 0.5, 0.75, 0.99)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_20_times_is_the_undisturbed_one(tmp_path: Path) -> None:
    figures = run("chaos", tmp_path / "out.json", "--kills", "20")
    assert figures["kills"] == 20
    assert figures["same_steps"]
    assert figures["same_weights"]
