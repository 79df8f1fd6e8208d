"""Made-up stories: a coloured shape that moves scene by scene, with a caption for each, as real mp4 files.

They are the data of TTT-Video's demo. Only the first caption names the shape and its colour; later ones say `it`. Every
scene is a shot of its own, in which the shape crosses the middle of the frame. In some stories it is gone for the
second scene, and out of sight in the frames which that one shares with its neighbours: what it looks like when it
returns stands nowhere but in the first scene.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from longtake.data.clips.video import write_video
from longtake.data.shapes import COLOURS, DIRECTIONS, SHAPES, SQUARE, caption, cover
from longtake.durable import write_whole
from longtake.random import Purpose, hash64, uniforms

FPS = 4
GONE = "then it is gone"
SHARED, SCENE = 2, 4  # frames of a latent frame, of which two scenes share one, and of a scene besides
_SPEED = 0.07, 0.08  # share of the frame that the shape crosses from one frame to the next
_OFF_CENTRE = 0.03  # share of the frame by which a story may lie beside its middle, either way
_NUM_DRAWS = 6
_HELDOUT = 9  # one story in so many is not trained on

Story = tuple[str, ...]  # a caption for each scene


def split_stories() -> tuple[list[Story], list[Story], list[Story], list[Story]]:
    """Stories of three scenes, first those in which the shape is always there: to train on, and held out. Then the same
    of those in which it is gone for the second scene. Each direction is another than the one before."""
    told: tuple[list[Story], ...] = ([], [], [], [])
    ways = [way for way in product(DIRECTIONS, repeat=3) if all(one != other for one, other in pairwise(way))]
    firsts = list(product(COLOURS, SHAPES))
    for number, ((colour, shape), way) in enumerate(product(firsts, ways)):
        story = caption(colour, shape, way[0]), *(f"then it moves {direction}" for direction in way[1:])
        told[(number + number // len(ways)) % _HELDOUT == 0].append(story)
    for number, ((colour, shape), way) in enumerate(product(firsts, product(DIRECTIONS, repeat=2))):
        story = caption(colour, shape, way[0]), GONE, f"then it moves {way[1]}"
        told[2 + ((number + number // 16) % _HELDOUT == 0)].append(story)
    return told


def scenes(story: Sequence[str], frames: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the frames in which each scene of a story can be seen, with what they are to show, the shape called by
    name."""
    name = " ".join(story[0].split()[:3])
    starts = [0, *(SHARED + SCENE * number for number in range(1, len(story))), len(frames)]
    found = []
    for number, (text, bounds) in enumerate(zip(story, pairwise(starts), strict=True)):
        hides = number + 1 < len(story) and story[number + 1] == GONE
        part = frames[bounds[0] : bounds[1] - SHARED * hides]
        found.append((text.replace("then it", name), part))
    return found


def make_stories(
    folder: str | Path,
    num_scenes: int,
    *,
    seed: int = 0,
    num_clips: int = 960,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write clips of 1 or 3 scenes and `clips.csv`, their table, whose captions are JSON arrays; return its path.

    Of three scenes, the shape is gone for one in half of the clips. Stories come in turns.
    """
    folder = Path(folder)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    told, _, gone, _ = split_stories()
    singles = [(caption(*way),) for way in product(COLOURS, SHAPES, DIRECTIONS)]
    kinds = [singles] if num_scenes == 1 else [told, gone]
    draws = uniforms(hash64("stories", seed), 0, Purpose.SAMPLING, 0, np.arange(num_clips), _NUM_DRAWS)
    rows = []
    for number in range(num_clips):
        stories = kinds[number % len(kinds)]
        story = stories[number // len(kinds) % len(stories)]
        name = f"clips/story_{number:05d}.mp4"
        write_video(folder / name, draw_story(story, draws[number]), FPS, crf=10)
        rows.append((name, json.dumps(story)))
        if progress is not None:
            progress(number + 1, num_clips)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("path", "text"), *rows])
    write_whole(folder / "clips.csv", table.getvalue(), synced=False)
    return folder / "clips.csv"


def draw_story(story: Sequence[str], draws: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the frames of a story, uint8 [T, H, W, 3], by 6 uniforms in [0, 1)."""
    size, speed, grey, shade, *off_centre = (float(draw) for draw in draws)
    side = SQUARE[0]
    step = side * (_SPEED[0] + speed * (_SPEED[1] - _SPEED[0]))
    parts, seen = [], np.ones(SHARED + SCENE * len(story), bool)
    for number, text in enumerate(story):
        count = SCENE if number else SHARED + SCENE
        start = len(seen) - SCENE * (len(story) - number) if number else 0
        if text == GONE:
            seen[start - SHARED : start + SCENE] = False
        way = np.array(DIRECTIONS.get(text.split()[-1], (0, 0))) * step
        parts.append((np.arange(count) - (count - 1) / 2)[:, None] * way)
    centres = side * (0.5 + _OFF_CENTRE * (2 * np.array(off_centre) - 1)) + np.concatenate(parts)
    colour, shape = story[0].split()[1:3]
    coverage = cover(shape, centres, side * (0.18 + 0.03 * size), side, side)[..., None]
    ground = np.full(3, 60 + 80 * grey)
    paint = np.array(COLOURS[colour]) * (0.9 + 0.1 * shade)
    return np.rint(ground + coverage * seen[:, None, None, None] * (paint - ground)).astype(np.uint8)
