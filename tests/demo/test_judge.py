from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.data.clips.video import read_frames, read_image
from longtake.data.shapes import COLOURS, DIRECTIONS, SHAPES, caption, cover, draw_clip, make_shapes, split_prompts
from longtake.demo.judge import Accuracy, is_continuous, judge, score
from longtake.encoders.autoencoder_config import LinearConfig
from longtake.encoders.linear import BlockStatistics, LinearAutoencoder, principal_components, split_blocks
from longtake.random import Purpose, uniforms

GREY = np.full((8, 32, 32, 3), 120, np.uint8)
MIDDLE = [0.9, 0.9, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def blur(frames: np.ndarray) -> np.ndarray:
    """Each frame as the mean of the 5 x 5 pixels around: blobs lose edges and form."""
    out = np.mean([np.roll(frames, (y, x), (1, 2)) for y in range(-2, 3) for x in range(-2, 3)], 0)
    return out.astype(np.uint8)


def test_real_clips_score_one_hundred_percent_in_every_window_of_eight_frames(tmp_path: Path) -> None:
    made = make_shapes(tmp_path, seed=11, num_clips=120, num_stills=18)
    clips = []
    with made.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["path"].endswith(".png"):
                clips.append((row["text"], read_image(tmp_path / row["path"])))
                continue
            frames = read_frames(tmp_path / row["path"])
            clips += [(row["text"], frames[start : start + 8]) for start in range(len(frames) - 7)]
            clips.append((row["text"], frames))
    assert score(clips) == Accuracy(1.0, 1.0, 1.0, 1.0, len(clips), 1.0)


def test_shapes_are_told_apart_on_clips_and_after_the_linear_autoencoder() -> None:
    """The judge is frozen: at least 99 % of made-up clips, at least 97 % of those that 192 components give back."""
    clips, captions = [], []
    for number, draws in enumerate(uniforms(5, 0, Purpose.SAMPLING, 0, np.arange(180), 9)):
        captions.append(split_prompts()[0][number % 60])
        clips.append(draw_clip(captions[-1], draws, wide=0.0, long=0.0)[:8])
    assert score(zip(captions, clips, strict=True)).shape >= 0.99
    pixels = torch.from_numpy(np.stack(clips)).movedim(-1, 1) / 127.5 - 1
    config = LinearConfig(channels=192, temporal=8, spatial=8)
    blocks = split_blocks(config, pixels)["blocks"].flatten(0, 3)
    statistics = BlockStatistics(config.block_size)
    statistics.add(blocks)
    autoencoder = LinearAutoencoder(config)
    autoencoder.encoding["blocks"].to_empty(device="cpu").load_state_dict(principal_components(statistics, config))
    with torch.no_grad():
        decoded = autoencoder.decode(autoencoder.posterior(pixels)["mean"], 8)
    frames = ((decoded * 127.5 + 127.5).round().byte().movedim(1, -1)).numpy()
    assert score(zip(captions, frames, strict=True)).shape >= 0.97


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_seen_at_any_size_through_soft_edges(shape: str) -> None:
    for radius in (4.0, 6.0, 8.0):
        centres = np.stack([np.linspace(12, 20, 8), np.full(8, 16.3)], axis=1)
        coverage = cover(shape, centres, radius, 32, 32)[..., None]
        frames = np.rint(120 + coverage * (np.array(COLOURS["blue"]) - 120)).astype(np.uint8)
        soft = np.mean([np.roll(frames, (y, x), (1, 2)) for y in (0, 1) for x in (0, 1)], 0).astype(np.uint8)
        assert (judge(frames).shape, judge(soft).shape) == (shape, shape)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_soft_noisy_blobs_are_judged_by_hue_and_motion(colour: str, direction: str) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        frames = blur(draw_clip(caption(colour, shape, direction), MIDDLE))[:8].astype(np.float32)
        frames += rng.normal(0, 10, frames.shape)
        judgement = judge(np.clip(frames, 0, 255).astype(np.uint8))
        assert (judgement.colour, judgement.direction) == (colour, direction)


def test_travel_is_measured_as_a_share_of_the_frame() -> None:
    frames = GREY.copy()
    for index in range(8):
        frames[index, 10:14, 4 + 2 * index : 8 + 2 * index] = COLOURS["cyan"]
    judgement = judge(frames)
    assert judgement.direction == "right"
    assert judgement.right == pytest.approx(14 / 32)
    assert judgement.down == pytest.approx(0.0)


def test_a_blob_that_stands_still_or_drifts_a_little_has_no_direction() -> None:
    frames = GREY.copy()
    for index in range(8):
        frames[index, 10:14, 4 + index // 3 : 8 + index // 3] = COLOURS["red"]  # 2 of 32 pixels
    judgement = judge(frames)
    assert (judgement.colour, judgement.direction) == ("red", None)


def test_grey_and_faintly_tinted_clips_have_no_colour() -> None:
    tinted = GREY.copy()
    tinted[..., 0] += 20
    assert judge(GREY).colour is None
    assert judge(tinted).colour is None


def test_the_larger_of_two_colours_is_the_dominant_one() -> None:
    frames = GREY.copy()
    frames[:, 2:12, 2:12] = COLOURS["blue"]
    frames[:, 20:24, 20:24] = COLOURS["yellow"]
    assert judge(frames).colour == "blue"


def test_frames_that_were_given_decide_nothing_and_fewer_frames_need_less_way() -> None:
    given = draw_clip("a red circle moves right", MIDDLE)[:8]
    made = draw_clip("a blue circle moves left", MIDDLE)[:8]
    whole = np.concatenate([given[:4], made[4:]])
    slow = GREY.copy()
    for index in range(8):
        slow[index, 10:14, 6 + index : 10 + index] = COLOURS["green"]  # 7 of 32 pixels, of which 3 in the last 4 frames
    assert (judge(whole, slice(4, None)).colour, judge(whole, slice(4, None)).direction) == ("blue", "left")
    assert judge(slow, slice(4, None)).direction == "right"
    assert judge(slow[4:]).direction is None
    found = score([("a blue circle moves left", whole)], slice(4, None))
    assert (found.colour, found.direction, found.continuity) == (1.0, 1.0, 0.0)  # goes on evenly: in all frames


def test_a_frame_in_which_the_blob_is_gone_decides_nothing() -> None:
    frames = draw_clip("a green circle moves up", MIDDLE)[:8]
    frames[[0, 7]] = 120
    assert judge(frames).direction == "up"


def test_accuracy_counts_colour_shape_direction_and_both() -> None:
    left = draw_clip("a red circle moves left", MIDDLE)
    still = draw_clip("a red circle", MIDDLE)
    pairs = [
        ("a red circle moves left", left),
        ("a red circle moves up", left),
        ("a blue circle moves left", left),
        ("A red circle.", still),
    ]
    assert score(pairs) == Accuracy(colour=3 / 4, shape=1.0, direction=2 / 3, both=2 / 4, count=4, continuity=1.0)


def test_a_jump_in_place_or_size_is_seen_and_steady_motion_is_not() -> None:
    frames = draw_clip("a blue square moves right", MIDDLE)
    assert is_continuous(blur(frames))
    jumped, grown, gone = frames.copy(), frames.copy(), frames.copy()
    jumped[5:] = np.roll(frames[5:], 5, axis=1)  # 5 of 32 pixels
    grown[5:, 1:9, 1:9] = COLOURS["blue"]
    gone[4] = 120
    assert not any(map(is_continuous, (jumped, grown, gone, GREY)))


def test_nothing_to_judge_is_not_a_number() -> None:
    empty = score([])
    assert empty.count == 0
    assert math.isnan(empty.colour)
    still = score([("a red circle", GREY[:1])])
    assert math.isnan(still.direction)
    assert math.isnan(still.continuity)


def test_prompts_without_a_colour_and_float_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="'a cat' names no colour"):
        score([("a cat", GREY)])
    with pytest.raises(ValueError, match=r"uint8 \[T, H, W, 3\], not float32"):
        judge(GREY.astype(np.float32))
