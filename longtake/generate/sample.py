"""Sampling: noise of a seed, guidance, solver, decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.buckets import frame_size
from longtake.contracts import Conditions
from longtake.data import caption
from longtake.diffusion import NEGATIVE, PROMPT, GuidanceScales, guided, make_solver
from longtake.random import Purpose, normals
from longtake.system import SamplingOption, System


@dataclass(frozen=True)
class Request:
    """One video to make."""

    text: str
    seed: int
    negative: str = ""


def pixel_shape(system: System, option: SamplingOption) -> tuple[int, int, int]:
    """`(T, H, W)` of the videos an option asks for. Raises `UserError` where the autoencoder cannot make them."""
    config = system.config
    height, width = frame_size(option.resolution, option.aspect_ratio, config.size_divisor)
    system.autoencoder.check(option.num_frames, height, width)
    return option.num_frames, height, width


def seeded_noise(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """The starting noise `[C, F, h, w]` of a seed, float32, the same on every machine and in every batch."""
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return torch.from_numpy(normals(seed, 0, Purpose.SAMPLING, 0, 0, count)).reshape(shape)


@torch.no_grad()
def sample_videos(
    system: System,
    requests: Sequence[Request],
    option: SamplingOption,
    on_step: Callable[[int, int, Tensor], None] | None = None,
) -> Tensor:
    """Makes one batch of videos: float32 `[B, 3, T, H, W]` in [-1, 1], on the device.

    Steps of the chosen solver along the objective's time grid, guided by the text; the branches of guidance run as one
    batch, and at a guidance of 1 only the prompt's runs. `on_step(steps done, steps in all, x)` after each step.
    Collective.
    """
    frames, height, width = pixel_shape(system, option)
    latent_shape = system.autoencoder.latent(frames, height, width)
    x = torch.stack([seeded_noise(r.seed, latent_shape) for r in requests]).to(system.device)
    texts = {PROMPT: [suffixed(system, r.text, frames) for r in requests]}
    if option.guidance != 1:
        texts[NEGATIVE] = [suffixed(system, r.negative, frames) if r.negative else "" for r in requests]
    branches = {name: system.blank_visual(system.embed(lines), x) for name, lines in texts.items()}

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return system.objective.velocity(system.denoiser(x, t, conditions), x, t)

    denoise = guided(velocity, branches, GuidanceScales(option.guidance), option.num_steps)
    shift = option.flow_shift if option.flow_shift is not None else ("training" if option.shift else None)
    grid = system.objective.grid(option.num_steps, latent_shape, shift).to(system.device)
    latents = make_solver(option.solver).sample(denoise, x, grid, on_step)
    return system.autoencoder.decode(latents, frames)


def suffixed(system: System, text: str, num_frames: int) -> str:
    """The prompt as the model saw captions in training: with its frame rate (a still has none) and motion score."""
    config = system.config
    fps = config.fps_save if num_frames > 1 else None
    if fps is not None and fps.is_integer():
        fps = int(fps)  # the form of compat prints the number as it is: "24 FPS", not "24.0 FPS"
    return caption(text, fps, config.motion_score, config.compat, kind="inference")
