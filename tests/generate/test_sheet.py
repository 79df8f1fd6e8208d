from __future__ import annotations

import numpy as np
import pytest

from longtake.generate.sheet import contact_sheet

RED, BLUE = (255, 0, 0), (0, 0, 255)


def clip(colour: tuple[int, int, int], num_frames: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.full((num_frames, height, width, 3), colour, np.uint8)


def count(sheet: object, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(sheet) == colour).all(-1).sum())


def test_every_video_is_shown_by_at_most_six_frames_from_first_to_last():
    frames = np.concatenate([clip(RED, 1), clip((0, 255, 0), 28), clip(BLUE, 1)])
    sheet = contact_sheet([("a square", frames)], cell=32)
    assert count(sheet, RED) == count(sheet, BLUE) == 32 * 32
    assert count(sheet, (0, 255, 0)) == 4 * 32 * 32


def test_a_video_of_fewer_frames_shows_each_once():
    assert count(contact_sheet([("", clip(RED, 3))], cell=16), RED) == 3 * 16 * 16


def test_stills_share_a_row_and_videos_do_not():
    stills = contact_sheet([("a", clip(RED, 1))] * 6, cell=32)
    one = contact_sheet([("a", clip(RED, 1))], cell=32)
    videos = contact_sheet([("a", clip(RED, 9))] * 2, cell=32)
    assert stills.height == one.height
    assert count(stills, RED) == 6 * 32 * 32
    assert videos.height > 1.8 * one.height - 12


def test_shapes_keep_their_proportions_whether_enlarged_or_made_smaller():
    assert count(contact_sheet([("a", clip(RED, 1, 24, 40))], cell=80), RED) == 48 * 80
    assert count(contact_sheet([("a", clip(RED, 1, 480, 160))], cell=96), RED) == 96 * 32


@pytest.mark.parametrize("prompt", ["", "two\nlines", "word " * 200, "x" * 500, "été 一只红色的圆 \u202e🙂"])
def test_any_prompt_can_stand_above_its_pictures(prompt: str):
    assert count(contact_sheet([(prompt, clip(RED, 2))], cell=32), RED) == 2 * 32 * 32
