from __future__ import annotations

from pathlib import Path

import pytest

from longtake.demo.run import DemoOutcome


@pytest.mark.parametrize(("report", "status"), [(Path("report.html"), 0), (None, 130)])
def test_the_folder_may_stand_anywhere_among_the_overrides(
    longtake, monkeypatch: pytest.MonkeyPatch, report: Path | None, status: int
):
    asked = []

    def fake(folder: Path, console: object, overrides: list[str], system: str) -> DemoOutcome:
        asked.append((folder, overrides))
        return DemoOutcome(folder, report=report)

    monkeypatch.setattr("longtake.demo.start.run_demo", fake)
    for words in (
        ("--folder", "x", "--lr", "1", "--max-steps", "-1"),
        ("--lr", "1", "--folder", "x", "--max-steps", "-1"),
        ("--lr", "1", "--max-steps", "-1", "--folder=x"),
    ):
        assert longtake("demo", *words)[0] == status
    assert asked == [(Path("x"), ["--lr", "1", "--max-steps", "-1"])] * 3


def test_the_default_place_is_outputs_demo(longtake, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        "longtake.demo.start.run_demo",
        lambda folder, *rest, system: asked.append((folder, system)) or DemoOutcome(folder),
    )
    longtake("demo")
    longtake("demo", "--system", "cogvideox_fun")
    assert asked == [(Path("outputs/demo"), "shapes"), (Path("outputs/demo_cogvideox_fun"), "cogvideox_fun")]
    monkeypatch.setattr(
        "longtake.demo.together.run_all", lambda folder, *rest: asked.append(folder) or DemoOutcome(folder)
    )
    longtake("demo", "--system", "all")
    assert asked[2:] == [Path("outputs")]


def test_an_unknown_system_is_told_which_there_are(mistake, tmp_path: Path):
    said = mistake("demo", "--folder", tmp_path / "demo", "--system", "sora")
    assert said.endswith(
        "--system sora: there is no such demo; choose cogvideox_fun or opensora_v1_2 or shapes or ttt_video, or all"
    )
    assert not (tmp_path / "demo").exists()


def test_a_mistake_is_one_sentence_and_makes_nothing(mistake, tmp_path: Path):
    assert "did you mean lr?" in mistake("demo", "--folder", tmp_path / "demo", "--lrr", "3")
    assert not (tmp_path / "demo").exists()
