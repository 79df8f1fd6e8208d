"""One generation from its config: prompts over the ranks, videos to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longtake.data import read_frames, read_image, write_image, write_video
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt, read_prompts
from longtake.generate.sample import Request, pixel_shape, sample_videos
from longtake.generate.sheet import contact_sheet
from longtake.generate.source import Source, load_weights
from longtake.parallel import Mesh, World
from longtake.system import System, build_system


@dataclass(frozen=True)
class Video:
    """One generated video and where it was written."""

    prompt: Prompt
    seed: int
    path: Path


def open_system(source: Source, world: World, say: Callable[[str], None] = print) -> System:
    """Builds the model that a generation samples from and fills it with its weights. Collective."""
    config = source.config
    system = build_system(config, Mesh.create(config.parallel, world), world)
    if source.checkpoint is not None:
        part = load_weights(system, source.checkpoint, config.ema)
        say(f"weights: {'averaged (ema)' if part == 'ema' else 'as trained'}, from {source.checkpoint}")
    return system


def generate(
    system: System, config: GenerateConfig, world: World, say: Callable[[str], None] = print
) -> list[Video]:
    """Makes every video that the config asks for and writes it; all ranks call it, each makes its share.

    Files: `save_dir/{video|image}_{resolution}/{name}[_{k}].mp4` (H.264) or `.png`, with the prompt in a `.txt` beside
    it; a name that is taken gets a number, nothing is overwritten. Returns all videos, on every rank.
    """
    prompts = read_prompts(config.prompt, config.prompts, config.num_samples)
    pixel_shape(system, config.sampling_option)
    folder = Path(config.save_dir) / _kind_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(prompts, config)
    batches = [jobs[i : i + config.batch_size] for i in range(0, len(jobs), config.batch_size)]
    made: list[tuple[int, Video]] = []
    for first in range(0, len(batches), world.size):  # ranks without a batch repeat the last: all run together
        number = first + world.rank
        batch = batches[min(number, len(batches) - 1)]
        frames = to_uint8(sample_batch(system, batch, config))
        if number < len(batches):
            for k, ((prompt, seed, name), video) in enumerate(zip(batch, frames, strict=True)):
                path = _write(folder, name, prompt.text, video, config.fps_save)
                made.append((number * config.batch_size + k, Video(prompt, seed, path)))
        done = min(len(jobs), (first + world.size) * config.batch_size)
        say(f"{done} of {len(jobs)} videos in {folder}")
    videos = [video for _, video in sorted((item for part in world.gather(made) for item in part), key=lambda m: m[0])]
    if config.grid and world.is_main:
        path = _free(folder, "grid", ".png")
        contact_sheet([(v.prompt.text, read_video(v.path)) for v in videos]).save(path)
        say(f"contact sheet: {path}")
    return videos


Job = tuple[Prompt, int, str]  # prompt, seed, file name


def _jobs(prompts: Sequence[Prompt], config: GenerateConfig) -> list[Job]:
    """Every video to make: video k of prompt i has seed `first + i * num_sample + k`, so each prompt has its own."""
    first = config.sampling_option.seed if config.sampling_option.seed is not None else config.seed
    each = config.num_sample
    return [
        (prompt, first + i * each + k, prompt.name if each == 1 else f"{prompt.name}_{k}")
        for i, prompt in enumerate(prompts)
        for k in range(each)
    ]


def sample_batch(system: System, batch: Sequence[Job], config: GenerateConfig) -> Tensor:
    """The videos of a few jobs at once: float32 `[B, 3, T, H, W]` in [-1, 1]."""
    requests = [
        Request(prompt.text, seed, config.negative_prompt if prompt.negative is None else prompt.negative)
        for prompt, seed, _ in batch
    ]
    return sample_videos(system, requests, config.sampling_option)


def to_uint8(videos: Tensor) -> np.ndarray:
    """`[B, 3, T, H, W]` in [-1, 1] -> uint8 `[B, T, H, W, 3]` on the CPU."""
    return ((videos + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy()


def _kind_folder(config: GenerateConfig) -> str:
    kind = "image" if config.sampling_option.num_frames == 1 else "video"
    return f"{kind}_{config.sampling_option.resolution}"


def _write(folder: Path, name: str, text: str, frames: np.ndarray, fps: float) -> Path:
    suffix = ".png" if len(frames) == 1 else ".mp4"
    path = _free(folder, name, suffix)
    if suffix == ".png":
        write_image(path, frames[0])
    else:
        write_video(path, frames, fps)
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return path


def _free(folder: Path, name: str, suffix: str) -> Path:
    """`folder/name.suffix`, or with the first number that is not taken."""
    path, number = folder / f"{name}{suffix}", 2
    while path.exists():
        path, number = folder / f"{name}-{number}{suffix}", number + 1
    return path


def read_video(path: Path) -> np.ndarray:
    """The frames of a written video or still: uint8 `[T, H, W, 3]`."""
    return read_image(path) if path.suffix == ".png" else read_frames(path)
