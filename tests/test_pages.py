"""The pages' one style, and what is drawn in it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from longtake import pages
from longtake.contracts import visible
from longtake.pages import (
    bar,
    curve,
    duration,
    figure,
    film,
    grid,
    histogram,
    html,
    joined,
    keys,
    meter,
    number,
    page,
    pairs,
    percent,
    table,
    tiles,
)
from tests.pages import Page

HOSTILE = '<script src="http://x">&\'"\ud800\x1b'


def test_whatever_comes_from_outside_is_escaped() -> None:
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    text = page(
        HOSTILE,
        html("<p>{}</p>", HOSTILE),
        tiles([(HOSTILE, HOSTILE)]),
        table((HOSTILE,), [(HOSTILE,), (HOSTILE,)]),
        pairs([(HOSTILE, HOSTILE)]),
        bar([(1, HOSTILE)], 1),
        keys({0: HOSTILE}),
        meter(0.5, HOSTILE),
        grid([figure(film(frames, 8, HOSTILE), HOSTILE, HOSTILE)]),
        curve(HOSTILE, [(1, 1), (2, HOSTILE), (3, 2)]),
        histogram(HOSTILE, np.arange(3.0), 0, 2),
        joined([HOSTILE]),
    )
    found = Page(text.encode().decode().replace("http://x", "x"))
    assert "<script" not in text
    assert found.texts.count(visible(HOSTILE).replace("http://x", "x")) == 17


def test_a_film_holds_its_frames_in_order_and_plays_for_as_long_as_they_do() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (10, 24, 40, 3), np.uint8)
    text = page("film", film(frames, 8, "a film"), film(frames[:1], 8, "a still"))
    (_, strip), (_, still) = Page(text).pictures
    assert np.array_equal(np.asarray(strip), np.concatenate(frames, axis=1)), "small ones are kept to the pixel"
    assert np.array_equal(np.asarray(still), frames[0])
    assert "--n:10;--s:1.250s;width:100%;aspect-ratio:40/24" in text
    assert "width:1000%;transform:translateX(-50.0000%)" in text, "the middle frame is at rest"


def test_a_long_and_large_film_is_thinned_and_reduced_and_takes_as_long() -> None:
    frames = np.zeros((200, 900, 1600, 3), np.uint8)
    frames[:] = np.linspace(0, 250, 200).astype(np.uint8)[:, None, None, None]
    text = page("film", film(frames, 25, "a film"))
    ((_, strip),) = Page(text).pictures
    assert strip.size == (24 * 320, 180)
    shades = np.asarray(strip)[90, 160::320, 0].astype(int)
    assert np.abs(shades - np.linspace(0, 250, 24)).max() < 4
    assert "--s:8.000s" in text


def test_a_bar_is_drawn_against_its_whole_and_cut_off_there() -> None:
    found = Page(page("bars", bar([(1, "a"), (0, "b"), (2, "c")], 4, mark=3), bar([(3, "d"), (9, "e")], 4), bar([], 0)))
    assert found.bars == [[("a", 25.0), ("c", 50.0)], [("d", 75.0), ("e", 25.0)], []]
    assert found.marks == [75.0]


@pytest.mark.parametrize(
    ("values", "low", "high", "shown"),
    [
        ([3.0, 3.5, 900.5], 3.0, 900.5, ["3", "900.5"]),
        ([0.001, 1, 2], 0.0001, 80_000, ["0.0001", "80,000"]),
        ([1.0, 2.0, 5.0], 1, 5, ["1", "5"]),
        ([7.0, 7.0], 7, 7, ["7"]),
        ([math.inf, 1.0], 1, math.inf, []),
        ([], 0, 0, []),
    ],
)
def test_the_ends_of_a_histogram_are_those_of_the_data(
    values: list[float], low: float, high: float, shown: list[str]
) -> None:
    text = page("histogram", histogram("column", np.array(values), low, high))
    said = [words for words in Page(text).section("column") if words[0].isdigit() and " to " not in words]
    assert said == shown
    heights = [float(part.split('"')[0]) for part in text.split('height="')[1:]]
    assert not shown or max(heights) == 100, "every value is in a bar"


def test_a_curve_has_round_ticks_and_says_what_it_leaves_out() -> None:
    losses = [(step, 2.0 / step) for step in range(1, 101)]
    found = Page(page("run", curve("loss", [*losses, (101, "NaN"), (102, None)], log=True)))
    assert {"2", "0.5", "0.1", "0.02", "20", "100"} <= set(found.texts)
    assert any(words.endswith("2 without a finite value left out") for words in found.texts)
    assert [line.count(" ") for line in found.lines[-2:]] == [200, 100]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "points",
    [
        [(7, 0.5), (8, 0.5)],
        [(1, 0.101), (2, 0.102)],
        [(step, 10.0 ** (step % 12 - 6)) for step in range(1, 5000)],
        [(1, 0.0), (2, 1.0)],
        [(1, 0), (2, 0)],
        [(3, 1.0), (3, 1.0)],
        [(1, 1e300), (2, -1e300)],
        [(1, 1e-300), (2, 3e-300)],
    ],
)
def test_any_run_of_numbers_can_be_drawn(points: list[tuple[int, float]], log: bool) -> None:
    text = page("run", curve("loss", points, log))
    drawing = text[text.index("<svg") : text.index("</svg>")]
    assert "nan" not in drawing
    assert "inf" not in drawing
    assert 1 <= text.count('class="y"') <= 6
    assert 1 <= text.count('class="x"') <= 5


@pytest.mark.parametrize("points", [[], [(1, 0.5)], [(1, math.nan), (2, 0.5)]])
def test_a_curve_needs_two_steps(points: list[tuple[int, float]]) -> None:
    assert "Too few steps" in curve("loss", points)


def test_numbers_are_written_as_people_write_them() -> None:
    numbers = (0, 1234567, 69140.4, 1234.5, 0.3, 12.3456, 0.00021, 5e-7, 1e16, math.nan, math.inf)
    written = ["0", "1,234,567", "69,140", "1,234", "0.3", "12.35", "0.00021", "5e-7", "1e16", "–", "∞"]
    assert [number(value) for value in numbers] == written
    seconds = (0.25, 45.2, 306, 3600, 20_000, 200_000, 3.1e7)
    assert [duration(value) for value in seconds] == [
        *("0.25 s", "45.2 s", "5 min 6 s", "60 min", "5.56 h", "2.31 days", "359 days"),
    ]
    assert [percent(share) for share in (1.0, 59 / 60, 0.5, 0.0, math.nan)] == ["100 %", "98.3 %", "50 %", "0 %", "–"]


def test_no_other_module_has_a_style_of_its_own() -> None:
    package = Path(pages.__file__).parent
    styled = [path.name for path in package.rglob("*.py") if re.search("<style|<!doctype", path.read_text("utf-8"))]
    assert styled == ["pages.py"]


def test_on_a_phone_each_cell_of_a_wide_table_says_its_column() -> None:
    rows = [("a", 1, 2), ("b",), ("c", 3, 4)]
    text = pages.table(("name", "of <one>", "two"), rows)
    assert re.findall(r'data-head="([^"]*)"', text) == ["name", "of &lt;one&gt;", "two"] * 2
    assert 'class="wide narrow"' in text
    assert "data-head" not in pages.table(("", ""), [("a", 1)]), "what is narrow anyway stays a table"
    assert "@media (max-width:40rem)" in pages.STYLE
