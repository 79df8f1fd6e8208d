"""Every benchmark of the data plane runs at its tiny size, prints its table and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["balance", "encode", "fetch", "finetune", "generate", "optimizer", "order", "probe", "solver", "table"]
)
def test_a_benchmark_runs_at_its_tiny_size(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--tiny", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2, "a head and at least one row"
    written = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert written["benchmark"] == name
    assert written["figures"]
    assert written["machine"]["commit"]


def test_every_committed_result_names_its_machine_and_commit() -> None:
    results = sorted((FOLDER / "results").glob("*.json"))
    assert results
    for path in results:
        machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
        assert machine["processor"], path.name
        assert machine["commit"], path.name
        assert (FOLDER / f"{path.stem}.py").exists(), f"{path.name}: no program makes it"
