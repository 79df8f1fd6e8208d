"""Captions and prompts of Open-Sora 1.2, against what that program made of them."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.contracts import UserError
from longtake.families.opensora_v1_2_text import _cleaned_once, caption, cleaned, raw_caption, read_prompt, with_scores
from tests.buckets.tables import golden

V1_2 = "opensora_v1_2"
PROMPTS = golden("prompts.json", V1_2)
RENAMED = {"aes": "aes", "flow": "flow", "camera_motion": "camera_motion"}


@pytest.mark.parametrize("case", golden("text_cleaning.json", V1_2), ids=lambda case: case["text"][:30])
def test_texts_are_cleaned_as_there(case: dict[str, str]) -> None:
    assert _cleaned_once(case["text"]) == case["once"]
    assert cleaned(case["text"]) == case["cleaned"]


@pytest.mark.parametrize(
    ("text", "once"),
    [
        ("a <script>f()</script> cat <style>b{}</style>", "a cat"),
        ("don\u02bct", "don't"),
        ("a dog\x85 runs", "a dog\u2026 runs"),
        ("a <![ b", "a <! b"),  # what the parser does not take stands as it is
    ],
)
def test_markup_and_broken_text_go_as_the_libraries_of_that_program_say(text: str, once: str) -> None:
    assert _cleaned_once(text) == once


def facts_of(case: dict[str, Any]) -> dict[str, Any]:
    return {ours: case[theirs] for theirs, ours in RENAMED.items()}


def test_scores_are_added_as_there() -> None:
    for case in PROMPTS["append_score"]:
        if case["camera_motion"] != "":  # ours says nothing of it
            assert [with_scores(text, facts_of(case)) for text in PROMPTS["append_score_input"]] == case["out"]


def test_captions_in_training_and_prompts_are_cleaned_alike() -> None:
    facts = {"aes": "5.53"}
    assert {caption("A Cat!", 24.0, 4, kind, facts) for kind in ("train", "inference")} == {
        "a cat! aesthetic score: 5.5."
    }
    assert [raw_caption("A Cat!", 24.0, 4, kind, facts) for kind in ("train", "inference")] == [
        "A Cat!",
        "a cat! aesthetic score: 5.5.",
    ]


def test_a_prompt_has_a_text_for_each_clip_as_there() -> None:
    for case in PROMPTS["split"]:
        if isinstance(case["loops"], str) or case["prompt"] == "|0|a|2|b|1|c":
            with pytest.raises(UserError, match='write "\\|0\\|first clip'):
                read_prompt(case["prompt"], 4)
        else:
            assert read_prompt(case["prompt"], 4).texts == tuple(text.strip() for text in case["loops"])


def test_a_prompt_names_its_references_as_there() -> None:
    for case in PROMPTS["json_tails"]:
        if "error" in case:
            with pytest.raises(UserError, match="prompt "):
                read_prompt(case["prompt"], 1)
            continue
        said = read_prompt(case["prompt"], 1)
        assert said.texts == (case["text"].strip(),)
        assert (said.refs or "given ref", said.kind or "given mask") == (case["reference_path"], case["mask_strategy"])


def test_the_whole_way_of_a_prompt_is_as_there() -> None:
    for case in PROMPTS["pipeline"]:
        for item, prompt in enumerate(case["prompts"]):
            said = read_prompt(prompt, case["loop"])
            assert (said.refs or "", said.kind or "") == (case["references"][item], case["mask_strategies"][item])
            final = [caption(text, 24.0, None, "inference", facts_of(case)) for text in said.texts]
            assert final == [of_loop[item] for of_loop in case["per_loop"]]


def test_score_that_a_prompt_holds_is_not_appended_again() -> None:
    for prompt in ("a cat. Aesthetic score: 5.", "a cat aesthetic score:5", "a cat aesthetic score: 5."):
        assert with_scores(prompt, {"aes": "6.5"}) == prompt
    assert with_scores("a cat", {"aes": "6.5"}) == "a cat aesthetic score: 6.5."
