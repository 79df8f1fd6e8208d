"""Generation: the videos of `longtake generate`, with their frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from longtake.data.clips.transforms import from_unit
from longtake.generate.checks import check_request
from longtake.generate.requests import Video
from longtake.generate.run import generate_from
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from longtake.track.progress import make_console
from longtake.train.health.interrupt import ended_by_signals

if TYPE_CHECKING:
    from longtake.config.load import Dialect

MadeVideo = tuple[Video, Tensor]  # and its frames, uint8 [T, H, W, 3]


def generate_videos(run: str, flags: Sequence[str], dialect: Dialect | None = None) -> list[MadeVideo]:
    """Make and write the videos that flags ask for; those that this process made, in the order of the prompts."""
    source = resolve_source(run, flags, dialect=dialect)
    doubts = check_request(source.config)
    console = make_console()
    frames: dict[Path, Tensor] = {}

    def take(paths: Sequence[Path], videos: Tensor) -> None:
        for path, pixels in zip(paths, from_unit(videos), strict=True):
            frames[path] = pixels.permute(1, 2, 3, 0).contiguous()

    with ended_by_signals(), start_world(source.config.device) as world:
        say = console.print if world.is_main else lambda line: None
        for line in doubts:
            say(line)
        videos = generate_from(source, world, say, take=take)
    return [(video, frames[video.path]) for video in videos if video.path in frames]
