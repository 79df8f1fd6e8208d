"""Sampling: seeded noise, conditioning frames, guidance, solver, decoding; and chains of clips: storyboards, loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from longtake.buckets.aspect import frame_size
from longtake.contracts import Caption, Conditions, Known, LatentShape, UserError
from longtake.data.clips.captions import caption, segment_captions
from longtake.data.clips.transforms import from_unit
from longtake.data.rules import Companion
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceScales, Guided
from longtake.diffusion.known import (
    NOTHING_KNOWN,
    Places,
    Window,
    frames_to_make,
    known_holder,
    make_known,
    noise_on_known,
    with_held,
)
from longtake.random import Purpose, normals
from longtake.system.build import System
from longtake.system.config import SamplingOption, SystemConfig
from longtake.system.examples import black_out, companion_conditions
from longtake.system.room import fits_at_once

OnStep = Callable[[int, int, Tensor], None]  # (steps done, steps in all, x)
_OF_VIDEO = 2**16  # draw number for a whole video's posterior; those of conditioning frames count from 0
_OF_COMPANIONS = _OF_VIDEO + 1  # that of the first companion's


@dataclass(frozen=True)
class Request:
    """One video to make."""

    text: Caption
    seed: int
    negative: Caption = ""
    places: Places = NOTHING_KNOWN  # what is known of it, by a kind of the family's law or of its own
    # Pixels [3, t, H, W] of each of its windows; None: of the clips before it in its chain.
    known: tuple[Tensor | None, ...] = ()
    start: float = 1.0  # noise level that sampling starts from, as a share; below 1 from `video` with noise added
    video: Tensor | None = None  # pixels [3, T, H, W], uint8 or in [-1, 1]
    companions: Mapping[str, Tensor] = field(default_factory=dict)  # by name, shaped as `Companion.shapes` says


def pixel_shape(system: System, option: SamplingOption) -> tuple[int, int, int]:
    """`(T, H, W)` of the videos an option asks for. Raises `UserError` where the autoencoder cannot make them."""
    shape = shape_asked(system.config, option)
    system.autoencoder.check(*shape)
    system.config.check_length(shape[0], system.autoencoder.latent(*shape)[1])
    return shape


def shape_asked(config: SystemConfig, option: SamplingOption) -> tuple[int, int, int]:
    """(T, H, W) that an option asks for: by the model's own tables of sizes, where it has some."""
    law = config.bucket_law
    return option.num_frames, *frame_size(option.resolution, option.aspect_ratio, config.size_divisor, law)


def seeded_noise(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Return the initial noise `[C, F, h, w]` of a seed, float32, the same on every machine and in every batch."""
    return torch.from_numpy(normals(seed, 0, Purpose.SAMPLING, 0, 0, math.prod(shape))).reshape(shape)


def sample_videos(
    system: System, requests: Sequence[Request], option: SamplingOption, on_step: OnStep | None = None
) -> Tensor:
    """Make one batch of videos as `stream_videos` does: float32 `[B, 3, T, H, W]` in [-1, 1], on the CPU."""
    return torch.cat(list(stream_videos(system, requests, option, on_step)), dim=2)


@torch.no_grad()
def stream_videos(
    system: System, requests: Sequence[Request], option: SamplingOption, on_step: OnStep | None = None
) -> Iterator[Tensor]:
    """Make one batch of videos, in chunks of frames as they are decoded: float32 `[B, 3, t, H, W]` in [-1, 1], on the
    CPU.

    Steps of the chosen solver along the objective's time grid, guided by the text and by what the requests know; the
    branches of guidance that a step needs run as one batch where memory allows. Latents that are known to the end are
    put over the result before it is decoded. All requests begin at the same `start`.
    `on_step(steps done, steps in all, x)` after each step. Collective.
    """
    shape = pixel_shape(system, option)
    latent_shape, objective = system.autoencoder.latent(*shape), system.objective
    noise = x = torch.stack([seeded_noise(r.seed, latent_shape) for r in requests]).to(system.device)
    family, windows = system.config.family, [window for r in requests for window in r.places.windows]
    known = known_of_requests(system, requests, shape, x) if windows else None
    branches = branch_conditions(system, requests, option, shape, x, known)
    stills = bool(windows) and all(len(window.frames) == 1 for window in windows)
    unit = objective.noise_time
    scales = guidance_scales(system.config, option, stills, known is not None and family.guided_by_known, unit)
    readers = family.readers(system.config.model) if known else frozenset()

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        if "x_mask" in readers:
            made = frames_to_make(known.held_at(t[0] / objective.noise_time))
            conditions = conditions.updated(x_mask=made.repeat(len(x) // len(made), 1))
        return objective.velocity(system.at(t).denoiser(x, t, conditions), x, t)

    shift = option.flow_shift if option.flow_shift is not None else ("training" if option.shift else None)
    solver = objective.solver(option.solver, option.num_steps)
    grid = objective.solver_grid(solver, option.num_steps, latent_shape, shift, shape).to(system.device)
    if (start := requests[0].start) < 1:
        grid = objective.grid_from(grid, start)
        x = latents_at(system, requests, noise, grid[:1])
    peers = system.mesh.num_peers if system.cut is None else system.cut.peers.count
    knows = (False, family.guided_by_known) if system.mesh.size > peers else ()
    beside = [guidance_scales(system.config, option, stills, one, unit) for one in knows]
    with system.denoising():
        batched = option.guidance_batch
        if batched == "auto":
            batched = fits_at_once(system, len(branches) * len(requests), latent_shape)
        steps = option.num_steps if scales.rule is None else len(grid) - 1  # a rule counts those made, as in diffusers
        denoise = Guided(velocity, branches, scales, steps, batched, beside)
        hold = None
        if "input" in readers:
            hold = known_holder(known, noise, objective.noised_at, objective.noise_time)
        latents = solver.sample(denoise, x, grid, on_step, step_noise(requests, latent_shape, system.device), hold)
    if known is not None:
        latents = with_held(latents, known)
    for chunk in system.autoencoder.decode_stream(latents, shape[0]):
        yield chunk.cpu()


def latents_at(system: System, requests: Sequence[Request], noise: Tensor, t: Tensor) -> Tensor:
    """Return the start of video-to-video sampling: latents noised to time t [1], [B, C, F, h, w]."""
    posterior = system.encoders.posterior(torch.stack([r.video for r in requests]))
    return system.objective.noised_at(drawn_latents(system, posterior, requests, _OF_VIDEO), noise, t)


def guidance_scales(
    config: SystemConfig, option: SamplingOption, stills: bool, by_known: bool, noise_time: float = 1.0
) -> GuidanceScales:
    """Return the guidance scales of an option; `stills`: single frames are known; `by_known`: they guide as the text
    does; `noise_time`: the objective's."""
    if option.method == "distill":
        return GuidanceScales(1.0)
    below = None
    if config.low_noise is not None and option.guidance_low is not None:
        below = config.low_noise.boundary * noise_time, option.guidance_low
    return GuidanceScales(
        option.guidance,
        option.guidance_img if by_known else None,
        option.text_osci,
        option.image_osci,
        option.scale_temporal_osci and by_known and stills,
        config.family.guidance_rule(option.guidance_rule, option.guidance_numbers),
        below,
    )


def branch_conditions(
    system: System,
    requests: Sequence[Request],
    option: SamplingOption,
    shape: tuple[int, int, int],
    x: Tensor,
    known: Known | None,
) -> dict[str, Conditions]:
    """Return the conditions of every branch of guidance that some step may need, for pixels (T, H, W) and x [B, C,
    F, h, w]; known: of the requests, None where nothing is."""
    distilled = option.method == "distill"  # the guidance scale is a condition
    by_known = known is not None and system.config.family.guided_by_known
    texts: dict[str, list[Caption]] = {PROMPT: [final_prompt(system.config, r.text, shape[0]) for r in requests]}
    is_guided = option.guidance != 1 or option.guidance_low not in (None, 1)
    if by_known or (is_guided and not distilled):
        texts[NEGATIVE] = [r.negative and final_prompt(system.config, r.negative, shape[0]) for r in requests]
    rate = fps_of(system.config, shape[0])
    rate = system.config.sample_rules.still_fps if rate is None else rate
    facts = system.facts_of(shape, torch.full((len(requests),), rate))
    companions = companions_of_requests(system, requests)
    facts = facts.updated(companions.masks, **companions)
    if distilled:
        facts = facts.updated(guidance=torch.full((len(requests),), option.guidance, device=system.device))
    blank = {PROMPT: embed_prompts(system, texts.pop(PROMPT), shape[0])}
    blank |= {name: embed_prompts(system, lines, shape[0], blank[PROMPT].masks) for name, lines in texts.items()}
    blank = {name: conditions.updated(facts.masks, **facts) for name, conditions in blank.items()}
    if system.law is not None:
        nothing = system.known_conditions(Known(torch.ones_like(x[:, :1, :, :1, :1]), torch.zeros_like(x)))
        blank = {name: conditions.updated(**nothing) for name, conditions in blank.items()}
    if known is None:
        return blank
    seen = {name: conditions.updated(**system.known_conditions(known)) for name, conditions in blank.items()}
    return {**seen, NOTHING: blank[NEGATIVE]} if by_known else seen


def companions_of_requests(system: System, requests: Sequence[Request]) -> Conditions:
    """Return the auxiliary inputs of requests as conditions for every branch of guidance. Raises `UserError` where some
    requests of a batch lack an input that others have."""
    kinds = [one for one in system.config.sample_rules.companions if any(one.name in r.companions for r in requests)]
    for one in kinds:
        if not all(one.name in r.companions for r in requests):
            raise UserError(f"companion {one.name!r}: some videos of a batch have it, others not; make them apart")
    names = {name for one in kinds for name in one.shapes((1, 1, 1))}
    brought = {name: torch.stack([r.companions[name] for r in requests]) for name in names}
    draws = {one.name: _OF_COMPANIONS + number for number, one in enumerate(kinds)}

    def draw(one: Companion, posterior: Mapping[str, Tensor]) -> Tensor:
        posterior = {"mean": posterior["mean"]} if one.by_mean else posterior
        return drawn_latents(system, posterior, requests, draws[one.name])

    return companion_conditions(system, kinds, system.encoders.companions(kinds, brought), draw)


def embed_prompts(
    system: System, lines: Sequence[Caption], num_frames: int, masks: Mapping[str, Tensor] = MappingProxyType({})
) -> Conditions:
    """Return the text conditions of prompts for videos of so many frames; an empty one becomes what stands for no
    text in training. `masks`: those of the prompts, which stay where what stands for no text has none of its own."""
    segments = system.config.sample_rules.segments
    each = lines if segments is None else [in_segments(line, segments(num_frames)) for line in lines]
    embedded = system.embed(each)
    if all(text.empty == "prompt" for text in system.config.family.texts):
        return embedded
    is_empty = torch.tensor([not line for line in lines], device=system.device)
    share = {text.condition: 1 - is_empty.float() for text in system.config.family.texts if text.empty != "prompt"}
    own = {
        name: torch.where(is_empty.view(-1, *[1] * (mask.dim() - 1)), mask, embedded.masks[name])
        for name, mask in masks.items()
        if name in share
    }
    return drop_text(embedded.updated(own), system.embed_nothing(), share, dict.fromkeys(share, 0.5))


def in_segments(text: Caption, needed: int) -> tuple[str, ...]:
    """Return a prompt for each segment of a video: a JSON array of them, or one for all. Raises `UserError`
    for others."""
    if isinstance(text, str) and not text.lstrip().startswith("["):
        return (text,) * needed
    try:
        return segment_captions(text if isinstance(text, str) else json.dumps(text), needed)
    except ValueError as error:
        raise UserError(
            f"prompt {str(text)[:80]!r}: {error}; give one text, or as many as there are segments"
        ) from None


def known_of_requests(system: System, requests: Sequence[Request], shape: tuple[int, int, int], x: Tensor) -> Known:
    """Return the known values of requests; x: their noise [B, C, F, h, w]. Each window is encoded by itself, as in
    training; a random posterior is drawn from by the request's seed."""
    made = 0

    def encode(rows: Sequence[int], window: Window) -> Tensor:
        nonlocal made
        some = [requests[row] for row in rows]
        pixels = [one.known[one.places.windows.index(window)] for one in some]
        given = [with_noise(one, shape) for one in some]
        posterior = system.encoders.posterior(black_out(torch.stack(pixels), window, given))
        if window.by_mean:
            posterior = {"mean": posterior["mean"]}
        made += 1
        latents = drawn_latents(system, posterior, some, made - 1)
        return latents[:, :, window.skip : window.skip + len(window.frames)]

    return make_known([request.places for request in requests], x, shape, encode, own=False)


def with_noise(request: Request, shape: tuple[int, int, int]) -> Places:
    """Return the places of a request, with the noise on given pixels (T, H, W) that they ask for, by its seed."""
    if not request.places.noise_level:
        return request.places
    numbers = normals(request.seed, 0, Purpose.KNOWN_NOISE, 0, 0, 3 * math.prod(shape)).reshape(3, *shape)
    return noise_on_known(request.places, torch.from_numpy(numbers))


def edited(places: Places, ratio: float, num_latents: int) -> Places:
    """Return `places` with known positions released at this fraction of the way at the latest, in a video of so many
    latent frames."""
    if (released := places.released) is None:
        released = torch.ones(1, num_latents, 1, 1)
        for window in places.windows:
            released[:, window.frames.start : window.frames.stop] = 0
    return replace(places, released=released.clamp_min(ratio))


def step_noise(
    requests: Sequence[Request], latent_shape: tuple[int, int, int, int], device: torch.device
) -> Callable[[int], Tensor]:
    """Return the noise that a solver adds at a step: each request's own, by its seed, the same in every batch."""
    count = math.prod(latent_shape)

    def noise(step: int) -> Tensor:
        drawn = [normals(request.seed, 0, Purpose.SOLVER, step, 0, count) for request in requests]
        return torch.from_numpy(np.concatenate(drawn)).reshape(-1, *latent_shape).to(device)

    return noise


def drawn_latents(system: System, posterior: Mapping[str, Tensor], requests: Sequence[Request], draw: int) -> Tensor:
    """Latents from a posterior; from a random one by the seeds of the requests, in the draw of this number."""
    normal = None
    if "std" in posterior:
        shape = posterior["std"].shape[1:]
        numbers = [normals(request.seed, 0, Purpose.POSTERIOR, 0, draw, shape.numel()) for request in requests]
        normal = torch.from_numpy(np.stack(numbers)).reshape(-1, *shape)
    return system.draw_latents(posterior, normal)


def final_prompt(config: SystemConfig, text: Caption, num_frames: int) -> Caption:
    """Return the prompt as the model saw captions in training: with its frame rate (a still has none) and
    motion score."""
    if not isinstance(text, str):
        return tuple(final_prompt(config, part, num_frames) for part in text)
    fps = fps_of(config, num_frames)
    if fps is not None and fps.is_integer():
        fps = int(fps)  # the published form prints the number as it is: "24 FPS", not "24.0 FPS"
    rules = config.sample_rules
    return caption(text, fps, config.motion_score, rules.caption, kind="inference", facts=rules.prompt_facts)


def fps_of(config: SystemConfig, num_frames: int) -> float | None:
    """Return the frame rate of a generated video; a still has none."""
    return config.fps_save if num_frames > 1 else None


def sample_chains(
    system: System, chains: Sequence[Sequence[Request]], option: SamplingOption, on_step: OnStep | None = None
) -> list[Tensor]:
    """Make a batch of chains of clips, clip by clip; return the video of each, float32 `[3, T, H, W]` in [-1, 1].

    A clip after the first that brings no pixels for a window takes them from its chain: at its head the last
    frames of the clip before, which its video shows once, faded into its own where these are not held; at its tail the
    first frames of the first clip, which closes a loop. One with a `start` below 1 begins from the clip before. All
    chains have as many clips, and begin the n-th at the same `start`. Collective.
    """
    made: list[Tensor] = []
    first: list[Tensor] = []  # clips, as bytes
    last: list[Tensor] = []
    total = len(chains[0])
    for number, clips in enumerate(zip(*chains, strict=True)):
        requests = [_continued(*one) for one in zip(clips, first, last, strict=True)] if number else clips

        def watch(done: int, steps: int, x: Tensor, number: int = number) -> None:
            if on_step is not None:
                on_step(number * steps + done, total * steps, x)

        videos = sample_videos(system, requests, option, watch)
        if number:
            clips = zip(made, videos, requests, strict=True)
            made = [joined(before, after, one.places.windows, system.latent) for before, after, one in clips]
        else:
            made = list(videos)
        if total > 1:
            last = [from_unit(video) for video in videos]
            first = first or last
    return made


def joined(before: Tensor, after: Tensor, windows: Sequence[Window], latent: LatentShape) -> Tensor:
    """Two videos [3, T, H, W] as one: what the second has of the first at its head is shown once. Where it was shown
    pixels and made frames of its own, these are faded in over the overlap, evenly from nothing on."""
    shown = max((len(frames) for one in windows for frames in one.shown or () if frames.start == 0), default=0)
    heads = [one for one in windows if one.is_head and one.shown is None and one.reference is None]
    held = [latent.pixel_frames(len(window.frames)) for window in heads]
    if shown:
        share = (torch.arange(shown) / shown)[:, None, None]
        faded = before[:, -shown:] * (1 - share) + after[:, :shown] * share
        return torch.cat([before[:, :-shown], faded, after[:, shown:]], dim=1)
    return torch.cat([before, after[:, max(held, default=0) :]], dim=1)


def _continued(request: Request, first: Tensor, last: Tensor) -> Request:
    """Return a request with what it takes from the first and the last clip of its chain so far: uint8 [3, T, H, W]."""
    known = request.known or (None,) * len(request.places.windows)
    taken = [
        _carried(window, first, last) if own is None else own
        for window, own in zip(request.places.windows, known, strict=True)
    ]
    return replace(request, known=tuple(taken), video=last if request.video is None else request.video)


def _carried(window: Window, first: Tensor, last: Tensor) -> Tensor:
    """Return the pixels of a window, from the first and the last clip of a chain so far."""
    if window.shown is None:
        return last[:, -len(window.pixels) :] if window.is_head else first[:, : len(window.pixels)]
    pixels = torch.zeros_like(last)
    for frames in window.shown:
        taken = last[:, -len(frames) :] if frames.start == 0 else first[:, : len(frames)]
        pixels[:, frames.start : frames.stop] = taken
    return pixels
