"""What is in a table, in numbers and as a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtake.data.clips.video import ClipError, write_image, write_video
from longtake.data.tables import stats
from longtake.data.tables.stats import table_facts, table_stats
from longtake.data.tables.stats_page import short_film, stats_page
from longtake.pages import html
from tests.data.made_clips import noise_frames
from tests.data.tables.test_shards import clips, write
from tests.pages import Page


def test_the_numbers_are_those_of_the_table(tmp_path: Path) -> None:
    table = clips()
    found = table_stats(write(table, tmp_path / "clips.parquet"))
    height = np.array(table["height"])
    column = found.numbers["height"]
    assert (found.rows, column.smallest, column.largest) == (100, height.min(), height.max())
    assert (column.median, column.mean) == (np.median(height), height.mean())
    assert found.numbers["aspect_ratio"].largest == (height / np.array(table["width"])).max()
    assert found.numbers["fps"].empty == table["fps"].null_count
    frames, fps = np.array(table["num_frames"]), table["fps"].to_numpy()
    timed = (frames > 1) & ~np.isnan(fps)
    assert found.seconds == pytest.approx((frames[timed] / fps[timed]).sum())
    assert dict(found.invalid) == {"num_frames": 1}
    assert found.empty_texts["text"] == table["text"].null_count
    assert found.lengths["text_short"].median == 8
    said = dict(table_facts(found))
    assert (said["rows"], said["rows that cannot be used"]) == ("100", "1 (1 num_frames)")


def test_a_large_table_is_sampled_and_its_range_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "SAMPLE_ROWS", 500)
    count = 5000
    table = pa.table({"path": [f"{row}.mp4" for row in range(count)], "score": np.arange(count)[::-1] / 10})
    source = write(table, tmp_path / "clips.csv")
    found = table_stats(source)
    column = found.numbers["score"]
    assert (found.sampled, column.smallest, column.largest, column.filled) == (500, 0, 499.9, count)
    assert len(column.sample) == 500
    assert 215 < column.median < 285
    np.testing.assert_array_equal(column.sample, table_stats(source).numbers["score"].sample)


def test_a_table_that_was_not_probed_has_statistics_too(tmp_path: Path) -> None:
    found = table_stats(write(pa.table({"path": ["a.mp4", "b.mp4"], "text": ["", "xy"]}), tmp_path / "clips.csv"))
    assert dict(table_facts(found)) == {"rows": "2", "rows without text": "1"}


def test_the_page_holds_histograms_frames_and_what_cannot_be_read(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise_frames(9, 32, 48), 8)
    write_image(tmp_path / "b.png", noise_frames(1, 16, 24)[0])
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    table = pa.table(
        {
            "path": ["a.mp4", "b.png", "bad.mp4"],
            "text": ["<b>a storm</b>", "a still", ""],
            "num_frames": [9, 1, 9],
            "height": [32, 16, 32],
            "width": [48, 24, 48],
            "fps": [8.0, None, 8.0],
        }
    )
    found = table_stats(write(table, tmp_path / "clips.parquet"), examples=5)
    assert [row for row, _, _ in found.examples] == [0, 1, 2]
    text = stats_page(found, lambda path: short_film(str(tmp_path / path)), html("<p>{}</p>", "48px <3> clips"))
    page = Page(text)
    assert [(alt, picture.size) for alt, picture in page.pictures] == [
        ("<b>a storm</b>", (9 * 48, 32)),
        ("a still", (24, 16)),
    ]
    assert page.texts.index("48px <3> clips") < page.texts.index("Clips"), "buckets stand first"
    assert any(words.startswith("cannot be read: cannot be decoded") for words in page.texts)
    assert text.count("<svg") == 7  # four columns of the table, text, aspect ratio and resolution
    shown = page.section("num_frames")
    assert shown[0] == "median 9"
    assert [words for words in shown if words.isdigit()][:2] == ["1", "9"], "the ends of the data"


def test_a_piece_of_a_clip_is_from_its_middle_and_plays_at_its_rate(tmp_path: Path) -> None:
    shades = np.linspace(0, 250, 81).astype(np.uint8)
    frames = np.repeat(shades, 32 * 48 * 3).reshape(81, 32, 48, 3)
    write_video(tmp_path / "a.mp4", frames, 12)
    film, fps = short_film(str(tmp_path / "a.mp4"))
    assert (len(film), fps) == (12, 6)  # 2 s, every other frame
    assert np.abs(film.mean((1, 2, 3)) - shades[28:52:2]).max() < 6
    write_video(tmp_path / "b.mp4", frames[:3], 12)
    film, fps = short_film(str(tmp_path / "b.mp4"))
    assert (len(film), fps) == (3, 12)
    with pytest.raises(ClipError, match="no such file"):
        short_film(str(tmp_path / "none.mp4"))
