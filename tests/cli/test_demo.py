from __future__ import annotations

from pathlib import Path

import pytest

from longtake.demo import DemoOutcome


@pytest.mark.parametrize(("report", "status"), [(Path("report.html"), 0), (None, 130)])
def test_the_folder_may_stand_anywhere_among_the_overrides(
    longtake, monkeypatch: pytest.MonkeyPatch, report: Path | None, status: int
):
    asked = []

    def fake(folder: Path, console: object, overrides: list[str]) -> DemoOutcome:
        asked.append((folder, overrides))
        return DemoOutcome(folder, report=report)

    monkeypatch.setattr("longtake.demo.run_demo", fake)
    for words in (
        ("--folder", "x", "--lr", "1", "--max-steps", "-1"),
        ("--lr", "1", "--folder", "x", "--max-steps", "-1"),
        ("--lr", "1", "--max-steps", "-1", "--folder=x"),
    ):
        assert longtake("demo", *words)[0] == status
    assert asked == [(Path("x"), ["--lr", "1", "--max-steps", "-1"])] * 3


def test_the_default_place_is_outputs_demo(longtake, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr("longtake.demo.run_demo", lambda folder, *rest: asked.append(folder) or DemoOutcome(folder))
    longtake("demo")
    assert asked == [Path("outputs/demo")]


def test_a_mistake_is_one_sentence_and_makes_nothing(mistake, tmp_path: Path):
    assert "did you mean lr?" in mistake("demo", "--folder", tmp_path / "demo", "--lrr", "3")
    assert not (tmp_path / "demo").exists()
