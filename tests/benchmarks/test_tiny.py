"""Every benchmark of the data plane runs at its tiny size, prints its table and writes its figures."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from longtake.parallel import missing_compiler
from tests import forks

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "balance",
        "compile",
        "encode",
        "fetch",
        "finetune",
        "forecast",
        "fp8",
        "generate",
        "goodput",
        "initialise",
        "optimizer",
        "order",
        "plan",
        "probe",
        "solver",
        "startup",
        "table",
        "ttt",
    ],
)
def test_a_benchmark_runs_at_its_tiny_size(name: str, tmp_path: Path) -> None:
    program = [str(FOLDER / f"{name}.py")] if name in ("plan", "startup") else ["-m", "tests.benchmarks.program", name]
    done = forks.run([sys.executable, *program, "--tiny", "--json", tmp_path / "figures.json"], timeout=900)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2, "a head and at least one row"
    written = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert written["benchmark"] == name
    assert written["figures"]
    if name == "compile":  # a GPU's kernels that add numbers up are chosen by rule, others by time
        graphs = written["figures"]["graphs"]
        assert sum(line["autotuned"] for line in graphs) > sum(line["reductions_autotuned"] for line in graphs) == 0
    assert written["machine"]["commit"]


@pytest.mark.slow
def test_steps_are_compared_with_a_forecast_from_rates_measured_here(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.benchmarks.program", "forecast", "--here", "--tiny"]
    done = forks.run([*program, "--json", tmp_path / "figures.json"], timeout=900)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]
    assert 0 < figures["least"] <= figures["median"] <= figures["most"]


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler is installed")
def test_a_launch_from_the_cache_of_compiled_code_is_compared_with_the_first(tmp_path: Path) -> None:
    program = [sys.executable, str(FOLDER / "compile.py"), "--again", "--tiny"]
    done = forks.run([*program, "--json", tmp_path / "figures.json"], timeout=900)
    assert done.returncode == 0, done.stderr
    launches = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]["launches"]
    assert [line["sizes"] for line in launches] == ["fixed", "left open"]
    assert all(line["cache_hits"] == 0 < line["from_cache_hits"] for line in launches)


@pytest.mark.slow
def test_encoding_takes_the_share_of_a_step_that_the_forecast_of_presets_says(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.benchmarks.program", "forecast", "--encoding", "--tiny"]
    done = forks.run([*program, "--json", tmp_path / "figures.json"], timeout=900)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]["lines"]
    steps = json.loads((FOLDER / "results" / "forecast.json").read_text(encoding="utf-8"))["figures"]["lines"]
    (step,) = (one for one in steps if (one["preset"], one["way"]) == (found["preset"], "after"))
    assert found["table"]["encoding_ms"] == pytest.approx(step["ms"]["encoding"], rel=0.01)
    assert found["target"]["share"] < found["table"]["share"]


def test_every_committed_result_names_its_program_machine_and_commit() -> None:
    results = sorted((FOLDER / "results").glob("*.json"))
    assert results
    for path in results:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["machine"]["processor"], path.name
        assert content["machine"]["commit"], path.name
        program = content.get("program", f"benchmarks/{content['benchmark']}.py")
        assert (FOLDER.parent / program).exists(), f"{path.name}: no program makes it"


def test_the_page_shows_the_committed_forecast_of_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    figures = json.loads((FOLDER / "results" / "forecast.json").read_text(encoding="utf-8"))["figures"]
    import_module("forecast").print_markdown(figures["lines"])
    page = (FOLDER.parent / "docs" / "speed.md").read_text(encoding="utf-8")
    shown = page.split("<!-- forecast -->\n")[1].split("<!-- end of forecast -->")[0]
    assert shown == capsys.readouterr().out
