"""What a demo shows beyond videos from prompts: videos that go on from a still, and adapters that learn a colour."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from longtake.data import filter_table, read_image, resize_crop, to_unit, write_image
from longtake.data.shapes import draw_clip
from longtake.durable import write_whole
from longtake.generate import GenerateConfig, Video
from longtake.generate.requests import plan_videos, shape_of
from longtake.generate.run import sample_batch
from longtake.random import Purpose, hash64, uniforms
from longtake.system import System

_DRAWS = 9  # uniforms of a made-up clip
CHECKED = 8  # videos whose pixels are looked at as they are sampled, before a file holds them


@dataclass(frozen=True)
class Check:
    """Something that a demo is to show, in words."""

    what: str
    value: float
    found: str  # the value as it is shown
    wanted: str


def seen_table(table: Path) -> Path:
    """The part of a table that leaves a colour out."""
    return table.with_name("seen.parquet")


def split_table(table: Path, colour: str) -> tuple[Path, Path]:
    """The clips without a colour and those with it, as tables beside `table`; those that are there stay."""
    found = seen_table(table), table.with_name("held_back.parquet")
    for path, word in zip(found, ("NOT LIKE", "LIKE"), strict=True):
        if not path.exists():
            filter_table(table, path, f"text {word} '% {colour} %'")
    return found


def draw_stills(folder: Path, prompts: Sequence[str]) -> Path:
    """A still for each prompt, the first frame of a clip that training has not seen; returns the table of both."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = uniforms(hash64("shapes", "stills"), 0, Purpose.SAMPLING, 0, np.arange(len(prompts)), _DRAWS)
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(("text", "ref"))
    for number, prompt in enumerate(prompts):
        write_image(folder / f"{number:04d}.png", draw_clip(prompt, draws[number], 0.0, 0.0)[0])
        rows.writerow((prompt, f"{number:04d}.png"))
    write_whole(folder / "prompts.csv", lines.getvalue(), synced=False)
    return folder / "prompts.csv"


def stills_of(table: Path) -> list[tuple[str, Path]]:
    """The prompts and stills of such a table."""
    with table.open(encoding="utf-8", newline="") as lines:
        return [(row["text"], table.parent / row["ref"]) for row in csv.DictReader(lines)]


def given_frames(videos: Sequence[Video], config: GenerateConfig) -> np.ndarray:
    """The still of each video at the video's size: uint8 [N, H, W, 3]."""
    size = shape_of(config)[1:]
    found = (resize_crop(read_image(video.refs[0]), size, config.sample_rules.pixels, True) for video in videos)
    return np.stack([(to_unit(one)[:, 0].permute(1, 2, 0).numpy() * 127.5 + 127.5).round() for one in found])


def least_psnr(system: System, config: GenerateConfig, folder: Path) -> Check:
    """How well the first frames of videos keep the stills they were given, dB, of the worst of a few. Collective."""
    videos, pixels = sample_few(system, config, folder)
    made = (pixels[:, :, 0].permute(0, 2, 3, 1) * 127.5 + 127.5).round().numpy()
    errors = np.square(made - given_frames(videos, config)).mean((1, 2, 3))
    least = float(10 * np.log10(255**2 / max(1e-6, errors.max())))
    return Check(f"given frame, the worst of {len(videos)}", least, f"{least:.1f} dB", "30 dB or more")


def sample_few(system: System, config: GenerateConfig, folder: Path) -> tuple[list[Video], torch.Tensor]:
    """The first videos that a config asks for, and their pixels in [-1, 1], [N, 3, T, H, W]; nothing is written.
    Collective."""
    videos = plan_videos(config.model_copy(update={"save_dir": str(folder), "num_samples": CHECKED}))
    return videos, sample_batch(system, videos, config)
