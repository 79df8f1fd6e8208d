"""One generation from its config: prompts over the ranks, videos to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from longtake.buckets import frame_size
from longtake.data import from_unit, read_frames, read_image, write_image, write_video
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt, read_prompts
from longtake.generate.sample import Request, pixel_shape, sample_videos
from longtake.generate.sheet import contact_sheet
from longtake.generate.source import Source, load_weights
from longtake.parallel import Mesh, World
from longtake.system import System, build_system


@dataclass(frozen=True)
class Video:
    """One video, to be made or made, and where it is written; the prompt lies in a `.txt` beside it."""

    prompt: Prompt
    seed: int
    path: Path


# progress(videos done, videos in all): the first is a fraction in the middle of a batch
OnProgress = Callable[[float, int], None]


def check_request(config: GenerateConfig) -> None:
    """Raises `UserError`, before a model is built, for prompts, a resolution or an aspect ratio that are none."""
    read_prompts(config.prompt, config.prompts, config.num_samples)
    frame_size(config.sampling_option.resolution, config.sampling_option.aspect_ratio, config.size_divisor)


def open_system(source: Source, world: World, say: Callable[[str], None] = print) -> System:
    """Builds the model that a generation samples from and fills it with its weights. Collective."""
    config = source.config
    system = build_system(config, Mesh.create(config.parallel, world), world)
    if source.checkpoint is not None:
        part = load_weights(system, source.checkpoint, config.ema)
        say(f"weights: {'averaged (ema)' if part == 'ema' else 'as trained'}, from {source.checkpoint}")
    else:
        for line in system.notes or (f"weights: from nowhere, as initialised by seed {config.seed}",):
            say(line)
    return system


def generate(
    system: System,
    config: GenerateConfig,
    world: World,
    say: Callable[[str], None] = print,
    progress: OnProgress | None = None,
) -> list[Video]:
    """Makes every video that the config asks for and writes it; all ranks call it, each makes its share.

    Files: `save_dir/{video|image}_{resolution}/{name}[_{k}].mp4` (H.264) or `.png`, with the prompt in a `.txt` beside
    it; a name that is taken gets a number, nothing is overwritten. Returns all videos, on every rank, in the order of
    the prompts. Raises `UserError` where there is no prompt or the model cannot make the size, OSError where nothing
    can be written.
    """
    pixel_shape(system, config.sampling_option)
    videos = _on_main(world, lambda: plan_videos(config))
    size, steps, mesh = config.batch_size, config.sampling_option.num_steps, system.mesh
    batches = [videos[i : i + size] for i in range(0, len(videos), size)]
    for first in range(0, len(batches), mesh.data_ranks):
        number = first + mesh.data_rank
        batch = batches[min(number, len(batches) - 1)]  # a rank without one repeats the last: all compute together
        begun, ended = first * size, min(len(videos), (first + mesh.data_ranks) * size)

        def on_step(step: int, begun: int = begun, ended: int = ended) -> None:
            if progress is not None:
                progress(begun + (ended - begun) * step / steps, len(videos))

        frames = to_uint8(sample_batch(system, batch, config, on_step))
        if number < len(batches) and mesh.peer_index == 0:  # peers made the same videos
            for video, pixels in zip(batch, frames, strict=True):
                _write(video, pixels, config.fps_save)
    world.barrier()
    say(f"{len(videos)} {'video' if len(videos) == 1 else 'videos'} in {_kind_folder(config)}")
    if config.grid and world.is_main:
        path = free_path(_kind_folder(config), "grid", ".png")
        write_image(path, np.asarray(contact_sheet([(v.prompt.text, read_video(v.path)) for v in videos])))
        say(f"contact sheet: {path}")
    return videos


def plan_videos(config: GenerateConfig) -> list[Video]:
    """Every video to make, with names that are free. Video k of prompt i has the seed `first + i * num_sample + k`.

    So each video has a seed of its own, which does not depend on batches and ranks.
    """
    prompts = read_prompts(config.prompt, config.prompts, config.num_samples)
    first = config.sampling_option.seed if config.sampling_option.seed is not None else config.seed
    folder, each = _kind_folder(config), config.num_sample
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".png" if config.sampling_option.num_frames == 1 else ".mp4"
    taken: set[Path] = set()
    videos = []
    for i, prompt in enumerate(prompts):
        for k in range(each):
            path = free_path(folder, prompt.name if each == 1 else f"{prompt.name}_{k}", suffix, taken)
            taken.add(path)
            videos.append(Video(prompt, first + i * each + k, path))
    return videos


def free_path(folder: Path, name: str, suffix: str, taken: set[Path] | frozenset[Path] = frozenset()) -> Path:
    """`folder/name.suffix`, or with the first number that makes it free, its `.txt` too."""
    number = 1
    while True:
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        if path not in taken and not path.exists() and not path.with_suffix(".txt").exists():
            return path
        number += 1


def sample_batch(
    system: System,
    batch: Sequence[Video],
    config: GenerateConfig,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """A few videos at once: float32 `[B, 3, T, H, W]` in [-1, 1]. `on_step(steps done)` after each solver step."""
    requests = [
        Request(video.prompt.text, video.seed, video.prompt.negative or config.negative_prompt) for video in batch
    ]
    watch = None if on_step is None else lambda done, total, x: on_step(done)
    return sample_videos(system, requests, config.sampling_option, watch)


def to_uint8(videos: Tensor) -> np.ndarray:
    """`[B, 3, T, H, W]` in [-1, 1] -> uint8 `[B, T, H, W, 3]` on the CPU."""
    return from_unit(videos).permute(0, 2, 3, 4, 1).cpu().numpy()


def read_video(path: Path) -> np.ndarray:
    """The frames of a written video or still: uint8 `[T, H, W, 3]`."""
    return read_image(path) if path.suffix == ".png" else read_frames(path)


def _kind_folder(config: GenerateConfig) -> Path:
    kind = "image" if config.sampling_option.num_frames == 1 else "video"
    return Path(config.save_dir) / f"{kind}_{config.sampling_option.resolution}"


def _write(video: Video, frames: np.ndarray, fps: float) -> None:
    if video.path.suffix == ".png":
        write_image(video.path, frames[0])
    else:
        write_video(video.path, frames, fps)
    video.path.with_suffix(".txt").write_text(video.prompt.text + "\n", encoding="utf-8")


def _on_main(world: World, work: Callable[[], list[Video]]) -> list[Video]:
    """What rank 0 finds, on every rank; its error too, so that nobody waits for it."""
    outcome: list[Video] | Exception = []
    if world.is_main:
        try:
            outcome = work()
        except (ValueError, OSError) as error:
            outcome = error
    outcome = world.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
