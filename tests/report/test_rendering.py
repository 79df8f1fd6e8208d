"""Templates: what is escaped, what is an error, and that no page has a style or frame of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from longtake import report
from longtake.pages import Html
from longtake.report import render
from tests.pages import Page

TEMPLATES = Path(report.__file__).parent / "templates"
PLAN = {
    "title": "<script>\x1b",
    "head": Html("<b>head</b>"),
    "layout": "a & b",
    "figures": [("what", "<i>")],
    "stage": "",
    "misfit": None,
    "columns": ("name", "value"),
    "entries": [("<x>", 1)],
    "parts": {0: "<y>"},
    "scale": "2 GiB",
    "usable": "1 GiB",
    "pace": "the target",
    "levels": None,
    "measured": None,
    "batches": None,
    "clips": None,
    "no_clips": "<gone>",
    "assumptions": "none",
}


def test_render_escapes_all_but_html_and_writes_out_control_characters() -> None:
    text = render("plan.html", **PLAN)
    page = Page(text)
    assert "<script" not in text
    assert {"<script>\\x1b", "head", "a & b", "<i>", "<x>", "<y>"} <= set(page.texts)
    assert any("<gone>" in words for words in page.texts)


def test_render_without_a_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="stage"):
        render("plan.html", **{name: value for name, value in PLAN.items() if name != "stage"})


def test_every_template_takes_frame_and_style_from_the_one_page() -> None:
    others = [path for path in TEMPLATES.glob("*.html") if path.name != "page.html"]
    assert others
    for path in others:
        text = path.read_text(encoding="utf-8")
        assert "<!doctype" not in text
        assert "<style" not in text
