"""Each benchmark runs at its smallest size, prints its table and writes its figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
ALIKE = (
    *(
        "balance",
        "chaos",
        "compile",
        "encode",
        "encoder_memory",
        "fetch",
        "finetune",
        "forecast",
        "fp8",
        "generate",
        "goodput",
    ),
    *("initialise", "optimizer", "order", "plan", "probe", "resume", "solver", "startup", "table", "ttt"),
)
TINY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ALIKE, ("--tiny",)),
    "checkpoint": ("--tiny", "--saves", "2"),
    "kernels": ("gemm", "attention", "--tiny", "--device", "cpu"),
    "preset_plans": ("--only", "demo/shapes"),
    "same_runs": ("--only", "mmdit;ttt_video, sequence"),
    "step": ("--tiny", "--no-peer", "--device", "cpu", "--remat", "1", "1"),
}
FRESH = ("plan", "preset_plans", "same_runs", "startup")  # start interpreters of a checkout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TINY)
def test_benchmark_at_its_smallest_size_prints_a_table_and_writes_figures(name: str, tmp_path: Path) -> None:
    program = [FOLDER / f"{name}.py"] if name in FRESH else ["-m", "tests.benchmarks.program", name]
    done = forks.run([sys.executable, *program, *TINY[name], "--json", tmp_path / "figures.json"], timeout=1100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2, "a head and at least one row"
    content = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert content["benchmark"] == name
    assert content["figures"]
    assert content["machine"]["commit"]
    if name == "chaos":
        assert content["figures"]["same_steps"]
        assert content["figures"]["same_weights"]


@pytest.mark.weekly
@pytest.mark.timeout(1200)
def test_chaos_20_kills_change_no_bit(tmp_path: Path) -> None:
    words = ["-m", "tests.benchmarks.program", "chaos", "--kills", "20", "--json", tmp_path / "figures.json"]
    done = forks.run([sys.executable, *words], timeout=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["figures"]
    assert found["same_steps"]
    assert found["same_weights"]


def figures(losses: Sequence[float], tensors: str = "a") -> dict[str, Any]:
    steps = [[number, "digest", loss.hex()] for number, loss in enumerate(losses, 1)]
    return {"steps": steps, "hash": tensors, "tensors": 2}


def test_same_runs_one_bit_of_a_loss_or_tensor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    same_runs = import_module("same_runs")
    before = {"mmdit": figures([1.0, 2.0]), "mmdit, restart": figures([1.0, 2.0])}
    assert list(same_runs.differences(before, before)) == []
    for changed in (figures([1.0, 2.0 + 2**-51]), figures([1.0, 2.0], "b"), figures([1.0])):
        after = before | {"mmdit": changed}
        (line,) = same_runs.differences(before, after)
        assert line.startswith("mmdit: ")
        assert len(list(same_runs.broken_restarts(after))) == 1


def test_preset_plans_entries_beyond_the_limit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    preset_plans = import_module("preset_plans")
    entry = {"batch_size": 1, "bytes": 2**30, "seconds": 1.0, "policy": {}}
    before = {"lora": {"policy": {}, "entries": {"256px/1f": entry}}}
    for changes, rows in (
        ({"seconds": 1.04}, 0),
        ({"seconds": 1.06}, 1),
        ({"bytes": 2**29}, 1),
        ({"batch_size": 2}, 1),
    ):
        after = {"lora": {"policy": {}, "entries": {"256px/1f": entry | changes}}}
        assert len(list(preset_plans.differences(before, after, 0.05))) == rows
    assert len(list(preset_plans.differences(before, {"lora": {"refused": "no"}}, 0.05))) == 1


def test_code_lines_without_blanks_comments_and_docstrings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    text = '"""One.\n\nTwo."""\n\n# a comment\nx = """\n\ntext"""  # three lines\n\n\n'
    text += 'def f():\n    "Doc."\n    return (\n        1\n    )\n'
    assert import_module("count_code").code_lines(text) == 3 + 1 + 3


def test_every_committed_result_names_its_program_machine_and_commit() -> None:
    results = sorted((FOLDER / "results").glob("*.json"))
    assert results
    for path in results:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["machine"]["processor"], path.name
        assert content["machine"]["commit"], path.name
        program = content.get("program", f"benchmarks/{content['benchmark']}.py")
        assert (ROOT / program).exists(), f"{path.name}: no program makes it"


def test_page_shows_the_committed_forecast_of_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    lines = json.loads((FOLDER / "results" / "forecast.json").read_text(encoding="utf-8"))["figures"]["lines"]
    import_module("forecast").print_markdown(lines)
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    shown = page.split("<!-- forecast -->\n")[1].split("<!-- end of forecast -->")[0]
    assert shown == capsys.readouterr().out
