"""What a demo shows beyond videos from prompts: videos that go on from a still, and adapters that learn a colour."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtake.data.clips.transforms import to_unit
from longtake.data.clips.video import write_image, write_video
from longtake.data.shapes import draw_clip
from longtake.data.tables.select import filter_table
from longtake.demo.systems import GivenCase
from longtake.durable import write_whole
from longtake.generate.config import GenerateConfig
from longtake.generate.requests import Video, clips_of, plan_videos
from longtake.generate.run import sample_batch
from longtake.random import Purpose, hash64, uniforms
from longtake.system.build import System
from longtake.train.config import RunConfig

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
    """Return the part of a table that leaves a colour out."""
    return table.with_name("seen.parquet")


def split_table(table: Path, colour: str) -> tuple[Path, Path]:
    """Return the clips without a colour and those with it, as tables beside `table`; those that are there stay."""
    found = seen_table(table), table.with_name("held_back.parquet")
    for path, word in zip(found, ("NOT LIKE", "LIKE"), strict=True):
        if not path.exists():
            filter_table(table, path, f"text {word} '% {colour} %'")
    return found


def draw_given(
    folder: Path, prompts: Sequence[str], given: GivenCase, config: RunConfig, looks: Mapping[str, Any]
) -> Path:
    """Return the frames that a prompt's video is to go on from, of a clip that training has not seen, for each
    prompt; returns the table of both."""
    folder.mkdir(parents=True, exist_ok=True)
    num_frames = config.sampling_option.num_frames
    draws = uniforms(hash64("shapes", "stills"), 0, Purpose.SAMPLING, 0, np.arange(len(prompts)), _DRAWS)
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(("text", "ref"))
    for number, prompt in enumerate(prompts):
        frames = draw_clip(prompt, draws[number], 0.0, 0.0, looks["shot"])[:: looks["every"]]
        names = [f"{number:04d}{'_' * place}.png" for place in range(len(given.stills))]
        for name, frame in zip(names, given.stills, strict=True):
            write_image(folder / name, frames[:num_frames][frame])
        if given.beginning:
            names.append(f"{number:04d}.mp4")
            write_video(folder / names[-1], frames[: given.beginning], config.fps_save, crf=10)
        rows.writerow((prompt, ";".join(names)))
    write_whole(folder / "prompts.csv", lines.getvalue(), synced=False)
    return folder / "prompts.csv"


def stills_of(table: Path) -> list[tuple[str, Path]]:
    """Return the prompts and stills of such a table."""
    with table.open(encoding="utf-8", newline="") as lines:
        return [(row["text"], table.parent / row["ref"]) for row in csv.DictReader(lines)]


def least_psnr(system: System, config: GenerateConfig, folder: Path, title: str) -> Check:
    """How well videos keep the frames they were given, dB, of the worst of a few. Collective."""
    videos, pixels = sample_few(system, config, folder)
    errors = []
    for video, made in zip(videos, pixels, strict=True):
        (asked,) = clips_of(video, config)
        for window, known in zip(asked.places.windows, asked.known, strict=True):
            for span in window.taken:
                first = window.pixels.start
                wanted = to_unit(known[:, span.start - first : span.stop - first])
                found, wanted = ((x * 127.5 + 127.5).round() for x in (made[:, span.start : span.stop], wanted))
                errors.append(float((found - wanted).square().mean()))
    least = 10 * math.log10(255**2 / max(1e-6, *errors))
    return Check(f"{title}: given frames, the worst of {len(videos)}", least, f"{least:.1f} dB", "30 dB or more")


def sample_few(system: System, config: GenerateConfig, folder: Path) -> tuple[list[Video], torch.Tensor]:
    """Return the first videos that a config asks for, and their pixels in [-1, 1], [N, 3, T, H, W]; nothing is written.
    Collective."""
    videos = plan_videos(config.model_copy(update={"save_dir": str(folder), "num_samples": CHECKED}))
    return videos, sample_batch(system, videos, config)
