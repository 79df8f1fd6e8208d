"""Animated pictures are clips, as a player shows them; pictures of one frame are images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from longtake.data.clips.animation import is_still
from longtake.data.clips.video import read_frames, read_image
from longtake.data.probing.folder import folder_table
from longtake.data.probing.metadata import metadata_table
from longtake.data.probing.one_file import frames_at, probe_file
from longtake.data.tables.table import ClipTable

KINDS: dict[str, dict[str, Any]] = {
    "a.webp": {"lossless": True},
    "b.png": {},
    "c.avif": {"quality": 100},
    "d.gif": {},
    "e.apng": {"format": "PNG"},
    "webp named.jpg": {"format": "WEBP", "lossless": True},
    "default picture.png": {"default_image": True},
}
COLOURS = [(40 * i, 0, 255 - 40 * i) for i in range(6)]


def save(path: Path, durations: list[int] | int, **options: Any) -> None:
    first, *others = [Image.fromarray(np.full((32, 48, 3), colour, np.uint8)) for colour in COLOURS]
    if "default_image" in options:
        others, first = [first, *others], Image.fromarray(np.full((32, 48, 3), 90, np.uint8))
    first.save(path, save_all=True, append_images=others, duration=durations, **options)


@pytest.mark.parametrize("name", KINDS)
def test_animated_picture_has_the_frames_and_times_that_a_player_shows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save(path, 100, **KINDS[name])
    info = probe_file(path)
    assert (info.num_frames, info.height, info.width, info.fps) == (6, 32, 48, 10)
    assert not is_still(path)
    assert not info.uneven_times
    shown = read_frames(path, [5, 0, 3])[:, 0, 0].astype(int)
    assert np.abs(shown - [COLOURS[5], COLOURS[0], COLOURS[3]]).max() <= 3  # lossy AVIF


@pytest.mark.parametrize("name", ["a.webp", "b.png", "c.avif", "d.gif"])
def test_uneven_animation_is_read_by_time(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, [100, 100, 500, 100, 100, 100], **KINDS[name])
    assert probe_file(tmp_path / name).uneven_times
    assert frames_at(tmp_path / name, np.array([0, 0.1, 0.25, 0.6, 0.7, 0.95])).tolist() == [0, 1, 2, 2, 3, 5]


def test_pictures_of_one_frame_stay_images(tmp_path: Path) -> None:
    for suffix in ("png", "webp", "avif", "jpg"):
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(np.full((32, 48, 3), 90, np.uint8)).save(path)
        assert is_still(path)
        assert probe_file(path).num_frames == 1
        assert np.abs(read_image(path).astype(int) - 90).max() <= 3
    pages = [Image.new("RGB", (48, 32), colour) for colour in ("red", "blue")]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    assert probe_file(tmp_path / "pages.tif").num_frames == 1


def test_folder_and_list_take_animated_pictures_as_clips(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for name, options in KINDS.items():
        save(clips / name, 100, **options)
    Image.fromarray(np.full((32, 48, 3), 90, np.uint8)).save(clips / "still.png")
    table = ClipTable.open(folder_table(clips), clips)
    frames = {table.written_path(row): int(table.num_frames[row]) for row in range(len(table))}
    assert frames == dict.fromkeys(KINDS, 6) | {"still.png": 1}
    rows = [{"file_path": name, "text": "a", "type": "image", "width": 48, "height": 32} for name in frames]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    table = ClipTable.open(metadata_table(tmp_path / "list.json", clips), clips)
    assert {table.written_path(row): int(table.num_frames[row]) for row in range(len(table))} == frames
