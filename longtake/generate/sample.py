"""Sampling: noise of a seed, known frames, guidance, solver, decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longtake.buckets import frame_size
from longtake.contracts import Conditions
from longtake.data import caption
from longtake.diffusion import (
    NEGATIVE,
    NOTHING,
    PROMPT,
    GuidanceScales,
    Kind,
    Window,
    guided,
    known_windows,
    make_solver,
    place_known,
    with_known,
)
from longtake.random import Purpose, normals
from longtake.system import SamplingOption, System, SystemConfig, fits_at_once


@dataclass(frozen=True)
class Request:
    """One video to make."""

    text: str
    seed: int
    negative: str = ""
    known: tuple[Tensor, ...] = ()  # pixels [3, T, H, W] of each window of the kind; none: nothing is known


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
    kind: Kind = "t2v",
) -> Tensor:
    """Makes one batch of videos: float32 `[B, 3, T, H, W]` in [-1, 1], on the device.

    Steps of the chosen solver along the objective's time grid, guided by the text and by the frames that the requests
    know; the branches of guidance that a step needs run as one batch where memory allows. Known latents are put over
    the result before it is decoded, for every request that has some. `on_step(steps done, steps in all, x)` after each
    step. Collective.
    """
    frames, height, width = pixel_shape(system, option)
    latent_shape = system.autoencoder.latent(frames, height, width)
    x = torch.stack([seeded_noise(r.seed, latent_shape) for r in requests]).to(system.device)
    windows = known_windows(kind, system.latent, frames) if any(r.known for r in requests) else ()
    visual = known_condition(system, requests, windows, x) if windows else None
    branches = branch_conditions(system, requests, option, x, visual)
    scales = guidance_scales(option, kind if windows else "t2v")

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return system.objective.velocity(system.denoiser(x, t, conditions), x, t)

    shift = option.flow_shift if option.flow_shift is not None else ("training" if option.shift else None)
    grid = system.objective.grid(option.num_steps, latent_shape, shift).to(system.device)
    beside = [guidance_scales(option, one) for one in ("t2v", kind)] if system.mesh.data_ranks > 1 else []
    with system.denoising():
        batched = option.guidance_batch
        if batched == "auto":
            batched = fits_at_once(system, len(branches) * len(requests), latent_shape)
        denoise = guided(velocity, branches, scales, option.num_steps, batched, beside)
        latents = make_solver(option.solver).sample(denoise, x, grid, on_step)
    if visual is not None:
        latents = with_known(latents, visual)
    return system.autoencoder.decode(latents, frames)


def guidance_scales(option: SamplingOption, kind: Kind) -> GuidanceScales:
    """The scales of an option for videos of a kind; a distilled model is told the scale and not guided."""
    if option.method == "distill":
        return GuidanceScales(1.0)
    return GuidanceScales(
        option.guidance,
        None if kind == "t2v" else option.guidance_img,
        option.text_osci,
        option.image_osci,
        option.scale_temporal_osci and kind.startswith("i2v"),
    )


def branch_conditions(
    system: System, requests: Sequence[Request], option: SamplingOption, x: Tensor, visual: Tensor | None
) -> dict[str, Conditions]:
    """The conditions of every branch of guidance that some step may need; x: [B, C, F, h, w].

    visual: of known frames; None where nothing is known.
    """
    frames = option.num_frames
    told = option.method == "distill"
    texts = {PROMPT: [final_prompt(system.config, r.text, frames) for r in requests]}
    if visual is not None or (option.guidance != 1 and not told):
        texts[NEGATIVE] = [final_prompt(system.config, r.negative, frames) if r.negative else "" for r in requests]
    blank = {name: system.blank_visual(system.embed(lines), x) for name, lines in texts.items()}
    if told:
        scale = torch.full((len(requests),), option.guidance, device=system.device)
        blank = {name: replace(conditions, guidance=scale) for name, conditions in blank.items()}
    if visual is None:
        return blank
    seen = {name: replace(conditions, visual=visual) for name, conditions in blank.items()}
    return {**seen, NOTHING: blank[NEGATIVE]}


def known_condition(system: System, requests: Sequence[Request], windows: Sequence[Window], x: Tensor) -> Tensor:
    """The visual condition [B, 1 + C, F, h, w] of requests, some of which know frames; x: their noise [B, C, F, h, w].

    Each window is encoded by itself, as in training; a random posterior is drawn from by the request's seed.
    """
    batch, channels, *size = x.shape
    visual = x.new_zeros(batch, 1 + channels, *size)
    rows = [row for row, request in enumerate(requests) if request.known]
    for number, window in enumerate(windows):
        moments = system.encoders.moments(torch.stack([requests[row].known[number] for row in rows]))
        normal = None
        if "std" in moments:
            shape = moments["std"].shape[1:]
            draws = [_posterior(requests[row].seed, number, shape) for row in rows]
            normal = torch.stack(draws)
        for row, latents in zip(rows, system.draw_latents(moments, normal), strict=True):
            place_known(visual[row], window, latents)
    return visual


def _posterior(seed: int, number: int, shape: torch.Size) -> Tensor:
    """Standard normal numbers for the draw of a video's known window, float32."""
    return torch.from_numpy(normals(seed, 0, Purpose.POSTERIOR, 0, number, shape.numel())).reshape(shape)


def final_prompt(config: SystemConfig, text: str, num_frames: int) -> str:
    """The prompt as the model saw captions in training: with its frame rate (a still has none) and motion score."""
    fps = config.fps_save if num_frames > 1 else None
    if fps is not None and fps.is_integer():
        fps = int(fps)  # the form of compat prints the number as it is: "24 FPS", not "24.0 FPS"
    return caption(text, fps, config.motion_score, config.compat, kind="inference")
