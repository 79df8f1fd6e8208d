from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from longtake.data.shapes import draw_clip
from longtake.demo.judge import Accuracy, judge
from longtake.demo.report import DemoReport, Group, ShownSample, loss_curve, percent, write_report
from tests.demo.pages import Page

RED = "a red circle moves left"
HOSTILE = 'a red <b>"circle"</b> & more'


def clip(text: str, is_long: float = 0.9) -> np.ndarray:
    return draw_clip(text, [0.9, is_long, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])


def report(**changes: object) -> DemoReport:
    film, still = clip(RED), clip("a blue square")
    samples = [ShownSample(RED, film, judge(film)), ShownSample("a blue circle moves left", film, judge(film))]
    values = {
        "num_steps": 1200,
        "num_clips": 1620,
        "real": Accuracy(1.0, 1.0, 1.0, 1620),
        "groups": [
            Group("Main", Accuracy(0.983, 0.967, 0.95, 60), samples),
            Group("Stills", Accuracy(0.5, math.nan, 0.5, 6), [ShownSample(HOSTILE, still, judge(still))]),
        ],
        "losses": [(step, 2.0 / step) for step in range(1, 101)],
        "buckets": {"32px/8f/3:2": {"shape": [8, 24, 40], "batch_size": 64, "clips": 1080, "micro_batches": 17}},
        "seconds": [("train", 90.0), ("generate", 30.0)],
        "facts": [("run folder", "/tmp/<x>")],
        "commands": [("more", 'longtake generate x --prompt "a"')],
        "fps": 8.0,
    }
    return DemoReport(**(values | changes))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    write_report(tmp_path / "report.html", report())
    return Page(tmp_path / "report.html")


def test_nothing_in_the_report_leads_out_of_it(page: Page, tmp_path: Path):
    text = (tmp_path / "report.html").read_text()
    assert page.links == []
    assert "http" not in text
    assert "url(" not in text
    assert not {"script", "link", "iframe", "object", "a"} & set(page.tags)


def test_videos_play_frame_by_frame_at_their_rate_and_stills_stand(page: Page):
    (_, film), _, (_, still) = page.pictures
    wanted = clip(RED)
    assert film.n_frames == len(wanted) == 10
    for number, frame in enumerate(wanted):
        film.seek(number)
        assert film.info["duration"] == 125
        assert (np.asarray(film.convert("RGB")) == frame).all()
    assert getattr(still, "n_frames", 1) == 1


def test_each_video_stands_beside_its_prompt_and_what_the_judge_saw(page: Page):
    assert [alt for alt, _ in page.pictures] == [RED, "a blue circle moves left", HOSTILE]
    first = page.texts.index(RED)
    assert page.texts[first : first + 4] == [RED, "✓ red, left", "a blue circle moves left", "✗ red, left"]


def test_accuracy_buckets_and_times_are_in_their_tables(page: Page):
    accuracy = page.section("Accuracy")
    assert accuracy[accuracy.index("Main") :][:5] == ["Main", "60", "98.3 %", "96.7 %", "95 %"]
    assert accuracy[accuracy.index("Stills") :][:5] == ["Stills", "6", "50 %", "–", "50 %"]
    assert page.section("Buckets")[5:10] == ["40 x 24", "8", "64", "1,080", "17"]
    assert page.section("Time")[3:9] == ["train", "90.0 s", "75 %", "generate", "30.0 s", "25 %"]
    assert "2:00 min" in page.texts


def test_the_curve_has_a_point_for_each_step_and_round_ticks(page: Page):
    assert page.lines == [100, 100]
    assert {"0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "step"} <= set(page.section("Loss"))


@pytest.mark.parametrize(
    "losses",
    [
        [(7, 0.5), (8, 0.5)],
        [(1, 0.101), (2, 0.102)],
        [(step, 10.0 ** (step % 12 - 6)) for step in range(1, 5000)],
        [(1, 0.0), (2, 1.0)],
    ],
)
def test_any_run_of_losses_can_be_drawn(losses: list[tuple[int, float]]):
    drawing = loss_curve(losses)
    assert "nan" not in drawing
    assert "inf" not in drawing
    assert 2 <= drawing.count("<text") <= 20


@pytest.mark.parametrize("losses", [[], [(1, 0.5)]])
def test_a_curve_needs_two_steps(losses: list[tuple[int, float]]):
    assert "Too few steps" in loss_curve(losses)


def test_shares_are_shown_as_exactly_as_they_matter():
    assert [percent(share) for share in (1.0, 59 / 60, 0.5, 0.0, math.nan)] == ["100 %", "98.3 %", "50 %", "0 %", "–"]


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path):
    broken = report(fps=0)
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path / "report.html", broken)
    assert list(tmp_path.iterdir()) == []
