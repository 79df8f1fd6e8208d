"""Made-up stories: a coloured shape that moves scene by scene, with a caption for each, as real mp4 files.

They are the data of TTT-Video's demo. Only the first caption names the shape and its colour; later ones say `it`. In
some stories it is gone for the second scene, and out of sight in the frames which that one shares with the first: what
it looks like when it returns stands nowhere but in the first scene.
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
SHARED, SCENE = 4, 4  # frames of a latent frame, of which two scenes share one, and of a scene besides
_SPEED = 0.055, 0.07  # share of the frame that the shape crosses from one frame to the next
_NUM_DRAWS = 10
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
    """The frames in which each scene of a story can be seen, with what they are to show, the shape called by name."""
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
    """Writes clips of 1 or 3 scenes and `clips.csv`, their table, whose captions are JSON arrays; returns its path.

    Of three scenes, the shape is gone for one in half of the clips. Stories come in turns.
    """
    folder = Path(folder)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    told, _, gone, _ = split_stories()
    singles = [(caption(*way),) for way in product(COLOURS, SHAPES, DIRECTIONS)]
    kinds = [singles] if num_scenes == 1 else [told, gone]
    draws = uniforms(
        hash64("stories", seed), 0, Purpose.SAMPLING, 0, np.arange(num_clips), _NUM_DRAWS
    )
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
    """The frames of a story, uint8 [T, H, W, 3], by 10 uniforms in [0, 1)."""
    size, speed, grey, shade, *places = (float(draw) for draw in draws)
    side = SQUARE[0]
    radius = side * (0.15 + 0.04 * size)
    room = side - 2 * radius
    moves = np.zeros((SHARED + SCENE * len(story), 2))  # from each frame to the next
    seen = np.ones(len(moves), bool)
    for number, text in enumerate(story):
        span = slice(SHARED + SCENE * number if number else 0, SHARED + SCENE * (number + 1))
        if text == GONE:
            seen[span.start - SHARED : span.stop] = False
        else:
            moves[span] = DIRECTIONS[text.split()[-1]]
    step = _SPEED[0] + speed * (_SPEED[1] - _SPEED[0])
    centres = np.empty_like(moves)
    for part in np.split(np.arange(len(moves)), np.flatnonzero(np.diff(seen)) + 1):
        way = np.concatenate([np.zeros((1, 2)), moves[part[1:]].cumsum(0)])
        extent = np.ptp(way, 0)
        way *= min(step * side, room / max(1.0, extent.max()))
        low, extent = way.min(0), np.ptp(way, 0)
        place, places = places[:2], places[2:]
        centres[part] = radius - low + (room - extent) * place + way
    coverage = cover(story[0].split()[2], centres, radius, side, side)[..., None] * seen[:, None, None, None]
    ground = np.full(3, 40 + 150 * grey)
    paint = np.array(COLOURS[story[0].split()[1]]) * (0.85 + 0.15 * shade)
    return np.rint(ground + coverage * (paint - ground)).astype(np.uint8)
