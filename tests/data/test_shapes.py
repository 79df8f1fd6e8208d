from __future__ import annotations

import csv
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from longtake.buckets.aspect import aspect_table, closest_ratio
from longtake.data.clips.video import read_frames, read_image
from longtake.data.shapes import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SQUARE,
    WIDE,
    draw_clip,
    make_shapes,
    split_prompts,
)
from tests.precision import within

NUM_CLIPS, NUM_STILLS = 120, 18


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes"), seed=3, num_clips=NUM_CLIPS, num_stills=NUM_STILLS)


def read_rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_names_every_file_by_a_relative_path_and_its_caption(shapes: Path) -> None:
    rows = read_rows(shapes)
    assert [list(row) for row in rows] == [["path", "text"]] * (NUM_CLIPS + NUM_STILLS)
    assert all((shapes.parent / row["path"]).is_file() for row in rows)
    assert Counter(Path(row["path"]).suffix for row in rows) == {".mp4": NUM_CLIPS, ".png": NUM_STILLS}


def test_captions_come_equally_often_and_never_from_the_held_out_ones(shapes: Path) -> None:
    texts = Counter(row["text"] for row in read_rows(shapes))
    assert {texts[prompt] for prompt in split_prompts()[0]} == {NUM_CLIPS // 60}
    assert not any(texts[prompt] for prompt in split_prompts()[1])
    assert texts["a red circle"] == 1


def test_prompt_files_hold_the_two_sets(shapes: Path) -> None:
    folder = shapes.parent
    assert tuple((folder / "train_prompts.txt").read_text().splitlines()) == split_prompts()[0]
    assert tuple((folder / "heldout_prompts.txt").read_text().splitlines()) == split_prompts()[1]


def test_twelve_of_seventy_two_are_held_out_and_every_pair_of_properties_is_still_seen() -> None:
    train, heldout = split_prompts()
    assert (len(set(train)), len(set(heldout)), len(set(train) & set(heldout))) == (60, 12, 0)
    assert set(Counter(text.split()[1] for text in heldout).values()) == {2}
    assert set(Counter(text.split()[2] for text in heldout).values()) == {4}
    assert set(Counter(text.split()[4] for text in heldout).values()) == {3}
    words = [set(text.split()) for text in train]
    for one, other in ((COLOURS, DIRECTIONS), (COLOURS, SHAPES), (SHAPES, DIRECTIONS)):
        assert all(any({a, b} <= caption for caption in words) for a, b in product(one, other))


def test_files_come_in_two_sizes_and_two_lengths_with_room_for_the_temporal_crop(shapes: Path) -> None:
    found = Counter()
    for row in read_rows(shapes):
        path = shapes.parent / row["path"]
        if path.suffix == ".png":
            assert read_image(path).shape[1:3] in {(32, 32), (24, 40)}
            continue
        length, height, width, _ = read_frames(path).shape
        assert length in {9, 10, 17, 18}
        found[height, width, length > 16] += 1
    assert set(found) == {(32, 32, False), (32, 32, True), (24, 40, False), (24, 40, True)}
    assert found[32, 32, False] > NUM_CLIPS * 0.4


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float32) - b).mean())


@pytest.mark.parametrize("compat", [None, "opensora_v2"])
def test_the_two_sizes_fall_into_the_two_main_buckets_of_32px(compat: str | None) -> None:
    table = aspect_table("32px", 8)
    (heights, widths) = zip(SQUARE, WIDE, strict=True)
    places = closest_ratio(heights, widths, table, compat)
    assert [list(table.values())[place] for place in places] == [(32, 32), (24, 40)]


def test_the_encoder_keeps_the_pixels(shapes: Path) -> None:
    again = {row["path"]: row["text"] for row in read_rows(shapes)}
    errors = []
    for path, text in again.items():
        if path.endswith(".mp4"):
            frames = read_frames(shapes.parent / path).astype(np.float32)
            paint = np.array(COLOURS[text.split()[1]], np.float32)
            errors.append(np.abs(frames - paint).max(-1).min())  # the pixel nearest to the pure colour
    assert np.mean(errors) < 40  # shades darken it by up to 35


def test_the_same_seed_makes_the_same_files_and_another_seed_others(shapes: Path, tmp_path: Path) -> None:
    same = make_shapes(tmp_path / "same", seed=3, num_clips=4, num_stills=1)
    other = make_shapes(tmp_path / "other", seed=4, num_clips=4, num_stills=1)
    for row in read_rows(same)[:4]:
        first = read_frames(shapes.parent / row["path"])
        again, another = (read_frames(made.parent / row["path"]) for made in (same, other))
        assert first.shape == again.shape
        assert (first == again).all()
        assert first.shape != another.shape or difference(first, another) > 2


def test_progress_is_told_for_each_file(tmp_path: Path) -> None:
    told = []
    make_shapes(tmp_path, num_clips=2, num_stills=1, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_shot_crosses_the_middle_over_a_ground_that_tells_which_frame_is_which(direction: str) -> None:
    frames = draw_clip(f"a red circle moves {direction}", [0.5] * 9, shot=5).astype(np.float64)
    mass = frames[..., 0] - frames[..., 1]
    centres = np.stack([mass.sum(1) @ np.arange(32), mass.sum(2) @ np.arange(32)], -1) / mass.sum((1, 2))[:, None]
    assert np.diff(frames[:, 0, 0, 0]).tolist() == [15] * 4
    assert centres[2] == pytest.approx([15.5, 15.5], abs=0.01)
    assert np.diff(centres, axis=0) == pytest.approx(0.135 * 32 * np.array([DIRECTIONS[direction]] * 4), abs=0.05)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_shape_stays_inside_and_moves_at_constant_speed_at_the_ends_of_every_draw(shape: str, direction: str) -> None:
    for corner in product((0.0, 0.999), repeat=7):  # wide, long, frames, size, speed, start x, start y
        *sizes, speed, x, y = corner
        frames = draw_clip(f"a red {shape} moves {direction}", [*sizes, speed, 0.5, x, y, 1.0]).astype(np.float64)
        mass = frames[..., 0] - frames[..., 1]  # 0 on the ground
        height, width = mass.shape[1:]
        assert mass.sum((1, 2)).std() < 0.02 * mass.sum((1, 2)).mean()  # never cut by the border
        centre = np.stack([mass.sum(1) @ np.arange(width), mass.sum(2) @ np.arange(height)], -1)
        steps = np.diff(centre / mass.sum((1, 2))[:, None], axis=0) / [width, height]
        assert within(np.abs(steps - steps.mean(0)).max(), 0.01)
        along = steps @ np.array(DIRECTIONS[direction])
        assert 7 * along.mean() > 0.165
        assert within(np.abs(steps @ np.array(DIRECTIONS[direction])[::-1]).max(), 0.01)


def test_a_still_is_one_frame() -> None:
    assert draw_clip("a blue square", [0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]).shape == (1, 32, 32, 3)
