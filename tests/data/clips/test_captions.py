from __future__ import annotations

import json
from pathlib import Path

import pytest

from longtake.buckets.assignment import frame_interval
from longtake.data.clips.captions import caption, published_rate

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "opensora_v2" / "captions.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["train"], ids=lambda case: f"vmaf {case['vmaf']} max {case['fps_max']}")
def test_the_published_form_writes_the_training_captions_of_the_reference(case: dict) -> None:
    for (text, fps, score), (expected, interval) in zip(GOLDEN["train_rows"], case["results"], strict=True):
        rate, stride = frame_interval(float("nan") if fps is None else fps, case["fps_max"])
        shown = published_rate(float(rate), fps, case["fps_max"]) if case["fps_max"] else None
        assert caption(text, shown, score if case["vmaf"] else None, "rate_as_published", "train") == expected
        assert stride == interval


@pytest.mark.parametrize("case", GOLDEN["inference"], ids=lambda case: f"{case['fps']} {case['motion_score']}")
def test_the_published_form_writes_the_prompts_of_the_reference(case: dict) -> None:
    for prompt, expected in zip(GOLDEN["inference_prompts"], case["results"], strict=True):
        assert caption(prompt, case["fps"], case["motion_score"], "rate_as_published", "inference") == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("shot at 60 FPS. a cat", "shot at 60 FPS. a cat. 24 FPS."),
        ("a cat. 30 FPS.", "a cat. 30 FPS."),
        ("a cat at 30 FPS", "a cat at 30 FPS."),
        ("a crate with the letters FPS.", "a crate with the letters FPS. 24 FPS."),
    ],
)
def test_only_a_rate_at_the_end_of_a_prompt_replaces_the_rate(prompt: str, expected: str) -> None:
    assert caption(prompt, 24, None, "rate_as_published", "inference") == expected


@pytest.mark.parametrize(
    ("text", "fps", "score", "expected"),
    [
        ("a cat", 24, 4, "a cat. 24 FPS, 4 motion score."),
        ("a cat.", 23.976, "4", "a cat. 24 FPS, 4 motion score."),
        (" a cat! ", 12.5, 2.5, "a cat! 13 FPS, 3 motion score."),
        ("a cat", 24, None, "a cat. 24 FPS."),
        ("a cat", 24, float("nan"), "a cat. 24 FPS."),
        ("a cat", 0, 4, "a cat. 4 motion score."),
        ("a cat", float("nan"), None, "a cat."),
        ("a cat", None, "", "a cat."),
        ("", 24, None, "24 FPS."),
        ("", None, None, ""),
        ("a car filmed at 60 FPS", 24, None, "a car filmed at 60 FPS. 24 FPS."),
    ],
)
def test_the_caption_tells_what_is_known(text: str, fps: float, score: float | str, expected: str) -> None:
    assert caption(text, fps, score) == expected


@pytest.mark.parametrize("kind", ["train", "inference"])
def test_training_and_generation_share_one_form(kind: str) -> None:
    assert caption("a cat", 24, 4, kind=kind) == "a cat. 24 FPS, 4 motion score."


@pytest.mark.parametrize(("fps", "score"), [(24, 4), (24, None), (None, 4)])
def test_a_caption_that_has_its_suffix_stays_as_it_is(fps: float | None, score: int | None) -> None:
    once = caption("a cat", fps, score)
    assert caption(once, 12, 7) == once


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        caption("a cat", 24, "dynamic")
