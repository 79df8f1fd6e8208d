"""Captions and prompts of Open-Sora 1.2: scores, cleaning, and the language of prompts for several clips.

Open-Sora 1.2 cleans prompts and trains on captions as they stand. Here both go through the same function, unless a run
has the quirk `raw_captions`.
"""

from __future__ import annotations

import html
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_plus

import ftfy
from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning, ParserRejectedMarkup

from longtake.contracts import UserError
from longtake.families.record import Spoken

_SCORES = {  # fact -> what its part of a caption begins with
    "aes": "aesthetic score: ",
    "flow": "motion score: ",
    "camera_motion": "camera motion: ",
}

_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58"
    "\ufe63\uff0d"
)
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
# What DeepFloyd's cleaner replaces, in its order: before markup is read, after it, and after broken text is mended.
_LINKS = (
    (rf"\b(?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
    (rf"\b(?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
)
_MARKS = (
    (r"@[\w\d]+\b", ""),
    (r"[\u31c0-\u4dff\u4e00-\u9fff]+", ""),
    (f"[{_DASHES}]+", "-"),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_WORDS = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # x may be Cyrillic, or a sign
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
)
_JOINERS = re.compile(r"[-_]")
_MANY_JOINERS = 3  # in a text with more, they stand for blanks
# Texts are no addresses or names of files, though some look so.
warnings.filterwarnings("ignore", category=MarkupResemblesLocatorWarning)


def caption(text: str, fps: float | None, score: int | None, kind: str, facts: Mapping[str, Any]) -> str:
    """Return a caption, or a prompt, with the scores that are known of it, cleaned."""
    return cleaned(with_scores(text, facts))


def raw_caption(text: str, fps: float | None, score: int | None, kind: str, facts: Mapping[str, Any]) -> str:
    """Return the same under the quirk `raw_captions`: prompts are cleaned, and captions in training are as
    they stand."""
    return text if kind == "train" else caption(text, fps, score, kind, facts)


def with_scores(text: str, facts: Mapping[str, Any]) -> str:
    """Return a text with its aesthetic score, motion score and camera motion, each where it is known and not there yet:
    `a cat` -> `a cat aesthetic score: 6.5.`"""
    for fact, words in _SCORES.items():
        value = facts.get(fact)
        if value is None or value == "" or words.strip() in text.lower():  # which the cleaner lowers
            continue
        if fact != "camera_motion":
            with suppress(ValueError):
                value = f"{float(value):.1f}"
        text = f"{text} {words}{value}."
    return text


def cleaned(text: str) -> str:
    """Return a text as T5 gets it: lower case, without links, markup and other noise; the cleaner runs twice."""
    return _cleaned_once(_cleaned_once(text))


def _cleaned_once(text: str) -> str:
    text = unquote_plus(text).strip().lower()
    text = _replaced(text.replace("<person>", "person"), _LINKS)
    with suppress(ParserRejectedMarkup):  # in which that program ends
        text = BeautifulSoup(text, features="html.parser").text
    text = _replaced(text, _MARKS)
    if len(_JOINERS.findall(text)) > _MANY_JOINERS:
        text = _JOINERS.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _replaced(text, _WORDS).strip()


def _replaced(text: str, table: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def read_prompt(prompt: str, num_clips: int) -> Spoken:
    """Return a prompt of Open-Sora 1.2: `|0|a day|2|a night` has a text for each clip from the one of that number
    on, and a JSON object at its end may name references and a mask strategy. Raises `UserError`."""
    text, given = _json_tail(prompt)
    return Spoken(_texts(text, num_clips), given.get("reference_path"), given.get("mask_strategy"))


def _json_tail(prompt: str) -> tuple[str, dict[str, str]]:
    text, brace, tail = prompt.partition("{")
    if not brace:
        return prompt, {}
    place = f"prompt {prompt[:80]!r}"
    try:
        given = json.loads(brace + tail)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise UserError(
            f"{place}: from the brace on it is no JSON object of texts; end it as in "
            '{"reference_path": "a.png", "mask_strategy": "0"}, or leave the brace out'
        )
    if unknown := [key for key in given if key not in ("reference_path", "mask_strategy")]:
        raise UserError(f'{place}: knows no {unknown[0]!r}; write "reference_path" and "mask_strategy"')
    return text.strip(), given


def _texts(text: str, num_clips: int) -> tuple[str, ...]:
    if not text.startswith("|0|"):
        return (text,) * num_clips
    numbers, texts = text.split("|")[1::2], text.split("|")[2::2]
    starts = [int(number) if number.isascii() and number.isdigit() else -1 for number in numbers]
    if len(starts) != len(texts) or starts != sorted(set(starts)) or starts[0] != 0:
        raise UserError(
            f"prompt {text[:80]!r}: its parts are not numbered clips in their order; write "
            '"|0|first clip|2|from the third clip on"'
        )
    last = [max(i for i, start in enumerate(starts) if start <= clip) for clip in range(num_clips)]
    return tuple(texts[i].strip() for i in last)
