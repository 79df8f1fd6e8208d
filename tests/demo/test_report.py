from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from longtake.data.shapes import draw_clip
from longtake.demo import together
from longtake.demo.judge import Accuracy
from longtake.demo.report import Group, ShownSample, write_report
from longtake.demo.run import DemoOutcome
from longtake.demo.together import run_all
from longtake.track.progress import make_console
from longtake.train.report import RunRecord
from tests.pages import Page
from tests.train.test_report import record

RED = "a red circle moves left"
HOSTILE = 'a red <b>"circle"</b> & more'


def clip(text: str) -> np.ndarray:
    return draw_clip(text, [0.9, 0.9, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])


def write(path: Path, of: RunRecord) -> None:
    film, still = clip(RED), clip("a blue square")
    samples = [ShownSample.of(RED, film), ShownSample.of("a blue circle moves left", film)]
    groups = [
        Group("Main", Accuracy(0.983, 0.75, 0.967, 0.95, 60, 0.9), samples),
        Group("Stills", Accuracy(0.5, 0.5, math.nan, 0.5, 6, math.nan), [ShownSample.of(HOSTILE, still)]),
    ]
    seconds = {"train": 90.0, "generate": 30.0}
    write_report(path, of, groups, Accuracy(1.0, 1.0, 1.0, 1.0, 1620, 1.0), seconds, [("device", "<none>")])


@pytest.fixture
def page(tmp_path: Path) -> Page:
    write(tmp_path / "report.html", record(tmp_path / "run"))
    return Page((tmp_path / "report.html").read_text())


def test_each_video_stands_beside_its_prompt_and_what_the_judge_saw(page: Page):
    assert [alt for alt, _ in page.pictures] == [RED, "a blue circle moves left", HOSTILE]
    assert np.array_equal(np.asarray(page.pictures[0][1]), np.concatenate(clip(RED), axis=1))
    first = page.texts.index(RED)
    assert page.texts[first : first + 4] == [
        RED,
        "✓ red, circle, left",
        "a blue circle moves left",
        "✗ red, circle, left",
    ]


def test_accuracy_and_times_stand_before_the_report_of_the_run(page: Page):
    accuracy = page.section("Accuracy")
    assert accuracy[accuracy.index("Main") :][:5] == ["Main", "60", "98.3 %", "75 %", "96.7 %"]
    assert accuracy[accuracy.index("Stills") :][:5] == ["Stills", "6", "50 %", "50 %", "–"]
    assert page.section("Parts of the demo")[:2] == ["train 90 s", "generate 30 s"]
    assert "2 min" in page.texts
    heads = ["Parts of the demo", "Curves", "Data", "Time", "Settings", "device", "<none>", "Go on"]
    assert [text for text in page.section("Accuracy") if text in heads] == heads


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path):
    of = record(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        write(
            tmp_path / "report.html",
            of.__class__(**vars(of) | {"config": of.config.model_copy(update={"fps_save": 0})}),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_demos_of_all_systems_stand_on_one_page_and_those_finished_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    of = record(tmp_path / "run")
    for name in ("demo", "demo_cogvideox_fun", "demo_ttt_video-2"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "report.html", of)
    (tmp_path / "demo_ttt_video").mkdir()  # was not finished
    asked = []

    def fake(folder: Path, console: object, overrides: list[str], system: str) -> DemoOutcome:
        asked.append((folder.name, overrides, system))
        if len(asked) == 2:
            folder.mkdir()
            write(folder / "report.html", of)
        return DemoOutcome(folder, report=folder / "report.html" if folder.exists() else None)

    monkeypatch.setattr(together, "run_demo", fake)
    assert run_all(tmp_path, make_console(), ["--seed", "1"]).stopped
    assert not (tmp_path / "demos.html").exists()
    outcome = run_all(tmp_path, make_console(), ["--seed", "1"])
    assert asked == [("demo_opensora_v1_2", ["--seed", "1"], "opensora_v1_2")] * 2
    page = Page(outcome.report.read_text())
    assert [alt for alt, _ in page.pictures] == [RED, "a blue circle moves left"] * 4
    systems = ["cogvideox_fun", "opensora_v1_2", "shapes", "ttt_video"]
    assert [text for text in page.texts if text in systems] == systems * 2  # in the table, and each with its videos
    assert "demo_ttt_video-2/report.html" in " ".join(page.texts)
    start = page.texts.index("shapes")
    assert page.texts[start + 1 : start + 6] == ["flux", f"{of.step:,}", "2 min", "98.3 %", "75 %"]
    section = page.texts[page.texts.index("shapes", start + 1) :]
    assert "the denoiser of Open-Sora 2.0" in section[1]
    start = section.index("Main")
    assert section[start : start + 6] == ["Main", "60", "98.3 %", "75 %", "96.7 %", "95 %"]
