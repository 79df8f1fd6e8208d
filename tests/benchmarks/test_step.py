"""The benchmark of a step runs at its smallest size, on a CPU, without diffusers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
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


def commands(folder: Path, part: str, **variables: str) -> list[list[str]]:
    """The programs that a part of `gpu.sh` starts, with their words."""
    python, said = folder / "python", folder / "said"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{said}\n')
    python.chmod(0o755)
    said.write_text("")
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(folder), **variables}
    subprocess.run([ROOT / "benchmarks" / "gpu.sh", part], env=environment, check=True, capture_output=True)
    return [line.split() for line in said.read_text().splitlines()]


@pytest.mark.slow
def test_every_part_for_a_gpu_runs_small_and_its_own_words_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], capture_output=True, text=True, check=True).stdout
    parts = listed.split(": ")[1].split()
    assert parts[0] == "kernels"
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for part in parts:
        for program, *words in commands(tmp_path, part):
            if Path(program).stem == "step":
                monkeypatch.setattr(sys, "argv", [program, *words])
                asked = import_module("step")._arguments()
                assert asked.remat is None or len(asked.remat) == len(asked.blocks)
        if part in ("encoders", "online") and not find_spec("diffusers"):
            continue
        for program, *words in commands(tmp_path, part, TINY="1"):
            line = [sys.executable, "-m", "tests.benchmarks.program", Path(program).stem, *words]
            done = forks.run(line, timeout=600)
            assert done.returncode == 0, done.stderr
            assert json.loads(Path(words[-1]).read_text())["figures"]["runs"]


@pytest.mark.slow
def test_the_overhead_of_the_trainer_is_told_by_part(tmp_path: Path) -> None:
    said, figures = run(tmp_path / "overhead.json", "--overhead")
    assert "target: other alone <= 2%" in said
    assert figures["parts_ms"]["wait"] > 0.05  # a batch is handed over in that, if it was there before
    assert 0 < figures["overhead_without_optimizer"] < figures["overhead"] < 1
    assert figures["steps"] >= 4
