"""Made-up clips: coloured shapes that move over a grey ground, with captions, as real mp4 and png files.

They are the data of the demo. Every clip moves at constant speed and keeps its shape inside the frame, so a window of
8 frames anywhere in it shows the motion its caption names. The same seed makes the same clips (the pixels before the
video encoder are equal on every machine).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from longtake.data.clips.video import write_image, write_video
from longtake.durable import write_whole
from longtake.random import Purpose, hash64, uniforms

# Six hues 60 degrees apart, none fully saturated, so that the encoder's rounding keeps them apart too.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 30, 30),
    "yellow": (230, 230, 30),
    "green": (30, 230, 30),
    "cyan": (30, 230, 230),
    "blue": (30, 30, 230),
    "magenta": (230, 30, 230),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x, y

FPS = 8
# Height and width of the files: of the table "32px" with sizes in multiples of 8, its square shape and its 16:9 one.
SQUARE, WIDE = (32, 32), (24, 40)
# Frames of the files: one or two more than the bucket's 8 or 16, enough for 4k + 1 too.
SHORT, LONG = (9, 10), (17, 18)
_WINDOW_STEPS = 7  # from the first to the last frame of the shortest window
# Easy enough for a small model in minutes: large shapes of nearly one size, on paths near the middle of the frame.
_RADIUS = {SQUARE: 0.25, WIDE: 0.29}  # share of the frame's height
_RADIUS_SPREAD = 0.03  # share of the radius, either way
_MIN_TRAVEL, _MAX_TRAVEL = 7.5, 9.0  # pixels that the shape crosses within such a window, where the frame has room
_PATH_OFFSET = 2.0  # pixels from the middle of the frame to the middle of the path, at most, in x and in y
_GROUND = 60, 140  # grey levels
_SHOT_STEP = 0.13, 0.14  # share of the frame that the shape of a shot crosses from one frame to the next
_OFF_CENTRE = 0.03  # share of the frame by which its way may lie beside the middle
_DAYBREAK = 60  # by how much its ground gets lighter

_NUM_DRAWS = 9  # uniforms for each clip


def caption(colour: str, shape: str, direction: str | None = None) -> str:
    """`a red circle moves left`; without a direction, `a red circle`."""
    return f"a {colour} {shape}" + (f" moves {direction}" if direction else "")


def split_prompts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the captions of the 60 combinations to train on, and of the 12 held out.

    Held out are two of each colour, four of each shape and three of each direction; every pair of colour and direction,
    colour and shape, shape and direction is still seen in training.
    """
    colours, directions = list(COLOURS), list(DIRECTIONS)
    heldout = {(c, (c + k) % 3, (c + 2 * k) % 4) for c in range(6) for k in range(2)}
    prompts: tuple[list[str], list[str]] = ([], [])
    for c, colour in enumerate(colours):
        for s, shape in enumerate(SHAPES):
            for d, direction in enumerate(directions):
                prompts[(c, s, d) in heldout].append(caption(colour, shape, direction))
    return tuple(prompts[0]), tuple(prompts[1])


def make_shapes(
    folder: str | Path,
    *,
    seed: int = 0,
    num_clips: int = 960,
    num_stills: int = 120,
    wide: float = 0.25,
    long: float = 0.25,
    every: int = 1,
    shot: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write clips, stills, `train_prompts.txt`, `heldout_prompts.txt` and `clips.csv`, the table; return its path.

    Captions come in turns, so that each is shown equally often. `wide` and `long`: the shares of files that are;
    `every`: only every so many frames are kept, at a lower rate; `shot`: as for `draw_clip`.
    `progress(files done, files in all)` is called after each file. Takes about 2 ms for a clip on one core.
    """
    folder = Path(folder)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    train, heldout = split_prompts()
    stills = [caption(colour, shape) for colour in COLOURS for shape in SHAPES]
    draws = uniforms(hash64("shapes", seed), 0, Purpose.SAMPLING, 0, np.arange(num_clips + num_stills), _NUM_DRAWS)
    rows: list[tuple[str, str]] = []
    for index in range(num_clips + num_stills):
        is_still = index >= num_clips
        texts, number = (stills, index - num_clips) if is_still else (train, index)
        text = texts[number % len(texts)]
        name = f"clips/still_{number:05d}.png" if is_still else f"clips/clip_{number:05d}.mp4"
        frames = draw_clip(text, draws[index], wide, long, shot)
        if is_still:
            write_image(folder / name, frames[0])
        else:
            write_video(folder / name, frames[::every], FPS / every, crf=10)
        rows.append((name, text))
        if progress is not None:
            progress(index + 1, num_clips + num_stills)
    for name, prompts in (("train_prompts.txt", train), ("heldout_prompts.txt", heldout)):
        write_whole(folder / name, "".join(f"{prompt}\n" for prompt in prompts), synced=False)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("path", "text"), *rows])
    write_whole(folder / "clips.csv", table.getvalue(), synced=False)
    return folder / "clips.csv"


def draw_clip(
    text: str, draws: Sequence[float] | np.ndarray, wide: float = 0.25, long: float = 0.25, shot: int = 0
) -> np.ndarray:
    """Return the frames of one caption, uint8 [T, H, W, 3] (T = 1 for a still), by 9 uniforms in [0, 1).

    shot: the frames of a clip, all of a length and square, in which the shape crosses the middle while day breaks: the
    ground tells which frame is which."""
    if shot:
        return _draw_shot(text, draws, shot)
    words = text.split()
    colour, shape, direction = words[1], words[2], words[4] if len(words) > 3 else None
    is_wide, is_long, length, size, speed, grey, offset_x, offset_y, shade = (float(draw) for draw in draws)
    height, width = WIDE if is_wide < wide else SQUARE
    shortest, longest = LONG if is_long < long else SHORT
    num_frames = shortest + int(length * (longest - shortest + 1)) if direction else 1
    radius = height * _RADIUS[height, width] * (1 + _RADIUS_SPREAD * (2 * size - 1))
    frame = np.array([width, height])
    room = frame - 2 * radius  # x, y: where the centre may be
    path = np.array(DIRECTIONS[direction] if direction else (0, 0), np.float64)
    path *= _travel(speed, num_frames, room, path)
    free = room - np.abs(path)
    offset = np.clip(_PATH_OFFSET * (2 * np.array([offset_x, offset_y]) - 1), -free / 2, free / 2)
    share = np.linspace(-0.5, 0.5, num_frames)[:, None]
    coverage = cover(shape, frame / 2 + offset + share * path, radius, height, width)[..., None]
    ground = np.full(3, _GROUND[0] + (_GROUND[1] - _GROUND[0]) * grey)
    paint = np.array(COLOURS[colour]) * (0.85 + 0.15 * shade)
    return np.rint(ground + coverage * (paint - ground)).astype(np.uint8)


def _draw_shot(text: str, draws: Sequence[float] | np.ndarray, num_frames: int) -> np.ndarray:
    _, colour, shape, _, direction = text.split()
    size, speed, grey, *off_centre, shade = (float(draw) for draw in draws[3:])
    side, frame = SQUARE[0], np.arange(num_frames)
    way = side * (_SHOT_STEP[0] + speed * (_SHOT_STEP[1] - _SHOT_STEP[0])) * np.array(DIRECTIONS[direction])
    middle = side * (0.5 + _OFF_CENTRE * (2 * np.array(off_centre) - 1))
    centres = middle + (frame - (num_frames - 1) / 2)[:, None] * way
    coverage = cover(shape, centres, side * (0.18 + 0.03 * size), side, side)[..., None]
    ground = 10 + 20 * grey + np.linspace(0, _DAYBREAK, num_frames)[:, None, None, None]
    paint = np.array(COLOURS[colour]) * (0.9 + 0.1 * shade)
    return np.rint(ground + coverage * (paint - ground)).astype(np.uint8)


def _travel(speed: float, num_frames: int, room: np.ndarray, path: np.ndarray) -> float:
    """Return the pixels from the first to the last centre of a clip, at most the room that the frame has."""
    if not path.any():
        return 0.0
    windows = (num_frames - 1) / _WINDOW_STEPS
    travel = windows * (_MIN_TRAVEL + speed * (_MAX_TRAVEL - _MIN_TRAVEL))
    return float(min(travel, room[int(np.argmax(np.abs(path)))]))


def cover(shape: str, centres: np.ndarray, radius: float, height: int, width: int) -> np.ndarray:
    """How much of each pixel the shape covers, float64 [T, H, W] in [0, 1]; centres [T, 2] as x, y in pixels. By the
    signed distance to the edge, which a pixel's width blends: smooth motion also below one pixel."""
    x = np.arange(width)[None, None, :] + 0.5 - centres[:, 0, None, None]
    y = np.arange(height)[None, :, None] + 0.5 - centres[:, 1, None, None]
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.88 * radius
    else:  # upright and equilateral: three edges at the inner radius from its centre of mass
        inner = 0.5 * radius
        below = y - inner / 2
        distance = np.maximum(np.sqrt(0.75) * np.abs(x) - below / 2, below) - inner
    return np.clip(0.5 - distance, 0.0, 1.0)
