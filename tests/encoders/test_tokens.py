"""A caption that is too long is cut before its end, which carries rate, scores and scene marks."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longtake.data.clips.captions import caption, caption_end
from longtake.encoders.tokens import CaptionTokens
from longtake.encoders.word_vectors import WordEncoder

WORDS = [f"w{number}" for number in range(40)]
BODY = " ".join(WORDS)


def tokens(single: str, max_length: int, text: str, marks: tuple[str, ...] = ()) -> CaptionTokens:
    """A tokenizer of the words of `text`."""
    names = ["<pad>", "<unk>", "<s>", "</s>", *dict.fromkeys(pre_tokenized(text)), *WORDS, *marks]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 2), ("</s>", 3)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.add_tokens(list(marks))
    return CaptionTokens(tokenizer, max_length, marks)


def pre_tokenized(text: str) -> list[str]:
    return [part for part, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)]


ENDS = {
    "rate": caption("x", 24, 4).removeprefix("x. "),
    "rate alone": caption("x", 23.976).removeprefix("x. "),
    "score alone": caption("x", None, 4).removeprefix("x. "),
    "published in training": caption("x", 24, 4, form="rate_as_published").removeprefix("x "),
    "published in inference": caption("x", 24, 4, form="rate_as_published", kind="inference").removeprefix("x. "),
    "scores of Open-Sora 1.2": "aesthetic score: 6.5. motion score: 3.0. camera motion: pan left.",
}


@pytest.mark.parametrize("single", ["$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_tokens_too_long_caption_keeps_its_end(end: str, single: str) -> None:
    text = f"{BODY}. {end}"
    assert caption_end(text) == end
    num_end, num_special = len(pre_tokenized(end)), single.count("s>")
    found = tokens(single, num_end + num_special + 7, text)
    ids, mask = found.encode([text, "w1 w2", text])
    words = found.tokenizer.convert_ids_to_tokens(ids[0].tolist())
    assert words == ["<s>"] * (num_special - 1) + WORDS[:7] + pre_tokenized(end) + ["</s>"]
    assert mask.sum(1).tolist() == [found.max_length, 2 + num_special, found.max_length]
    overflow = found.overflow(text)
    assert overflow.lost.split() == [*WORDS[7:], "."]
    assert overflow.length == len(pre_tokenized(text)) + num_special
    assert found.overflow("w1 w2") is None


def test_tokens_caption_that_just_fits_is_whole() -> None:
    for extra in (0, 1):
        found = tokens("$A </s>", len(WORDS) + 1 - extra, BODY)
        assert (found.overflow(BODY) is not None) == bool(extra)
        assert found.encode([BODY])[0][0, -1] == 3


@pytest.mark.parametrize("max_length", [1, 2, 3, 8])
def test_tokens_without_room_for_the_end_keep_the_beginning(max_length: int) -> None:
    text = f"{BODY}. {ENDS['rate']}"
    found = tokens("$A </s>", max_length, text)
    ids, _ = found.encode([text])
    assert found.tokenizer.convert_ids_to_tokens(ids[0].tolist()) == [*WORDS[: max_length - 1], "</s>"]


def test_tokens_scene_marks_at_the_end_stay() -> None:
    found = tokens("$A </s>", 6, BODY, marks=("<start>", "<end>"))
    ids, _ = found.encode([f"<start> {BODY}<end>"])
    assert found.tokenizer.convert_ids_to_tokens(ids[0].tolist()) == ["<start>", *WORDS[:3], "<end>", "</s>"]


def test_caption_end_is_empty_where_words_only_look_like_one() -> None:
    for text in ("shot at 24 FPS by a cat", "24 FPS. a cat", "a cat.", "", "the motion score: low"):
        assert caption_end(text) == ""


def test_words_too_long_caption_keeps_its_end() -> None:
    encoder = WordEncoder(8, 7)
    text = f"{BODY}. {ENDS['rate']}"
    assert encoder.overflow(text).lost.split() == WORDS[2:]
    whole = WordEncoder(8, 7).encode(["w0 w1 24 fps 4 motion score"])
    for cut, expected in zip(encoder.encode([text]), whole, strict=True):
        assert cut.equal(expected)
    assert encoder.mask([text]).sum() == 7
    assert encoder.overflow("w1 w2") is None
