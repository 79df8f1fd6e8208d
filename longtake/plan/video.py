"""Forecast of a generation: seconds for its videos, and bytes on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from longtake.contracts import UserError
from longtake.encoders.cost import autoencoder_cost, facts_of, on_meta
from longtake.generate.config import GenerateConfig
from longtake.generate.options import own_config
from longtake.generate.prompts import Prompt
from longtake.generate.requests import Video, kind_of, refs_of, strength_of
from longtake.generate.rounds import alike, batches_of, rounds, says_degrees
from longtake.generate.sample import guidance_scales, shape_asked
from longtake.models.build import denoiser_class
from longtake.models.trace import Trace
from longtake.pages import duration
from longtake.parallel.config import divisors, resolve_degrees
from longtake.parallel.mesh import Mesh
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import NUMBER_BYTES, Layout, MicroBatch, Upkeep
from longtake.plan.machine import Machine
from longtake.plan.measure import device_here, device_named
from longtake.plan.parameters import compute_dtype, count_weights, weights_of
from longtake.plan.rates import measured_rates
from longtake.plan.remedies import gib
from longtake.plan.report import rates_words
from longtake.plan.speed import forward_seconds
from longtake.plan.trace_cache import traced_before
from longtake.system.encoders import encoder_bytes, encoding_costs
from longtake.system.room import forward_bytes


@dataclass(frozen=True)
class VideoForecast:
    """Of all videos that a request asks for."""

    parts: Mapping[str, float]  # seconds: embedding texts, encoding references, denoising, decoding, stills before it
    bytes: int  # on the fullest GPU
    forwards: int  # of the denoiser for one video, each branch of guidance by itself

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def forecast_videos(config: GenerateConfig, machine: Machine, gpus: int = 1, count: int = 1) -> VideoForecast:
    """Seconds and bytes of `count` videos on `gpus` GPUs, once weights are loaded. Nothing is read or built. Raises
    `UserError` where the degrees of the config divide neither the GPUs nor the model, or its autoencoder cannot make
    the size."""
    shape = shape_asked(config, config.sampling_option)
    config.check_shape(*shape)
    degrees, tensor = _degrees(config, gpus)
    ranks = gpus // tensor
    batches = batches_of(range(count), config.batch_size, ranks // degrees[0])
    times: Counter[str] = Counter()
    most = forwards = 0
    for numbers, degree in rounds(len(batches), ranks, degrees):
        layout = _layout(config, gpus, degree, tensor)
        found = _batch(config, shape, max(len(batches[number]) for number in numbers), layout, machine)
        times.update(found.parts)
        most, forwards = max(most, found.bytes), found.forwards
    parts = {name: seconds * config.num_clips for name, seconds in times.items()}
    if config.use_t2i2v:
        stills = forecast_videos(config.of_stills(), machine, gpus, count)
        parts, most = {"stills": stills.seconds, **parts}, max(most, stills.bytes)
    return VideoForecast(parts, most, forwards)


def machine_named(gpu: str | None) -> Machine:
    """GPUs of a kind, as measured here where they were; None: of the kind that is here, or an H200."""
    device = device_named(gpu or (device_here() if torch.cuda.is_available() else "h200"))
    return Machine(device, measured=measured_rates(device.name))


def video_words(config: GenerateConfig, machine: Machine, gpus: int, prompts: Sequence[Prompt] = ()) -> str:
    """Return the forecast of all videos of these prompts in words, a line for those that are alike; of one
    without any."""
    lines, total, requests = [], 0.0, _requests(config, prompts)
    for own, count in requests:
        found = forecast_videos(own, machine, gpus, count)
        total += found.seconds
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.parts.items() if seconds)
        frames, height, width = shape_asked(own, own.sampling_option)
        clips = f" in {own.num_clips} clips each" if own.num_clips > 1 else ""
        lines.append(
            f"{count} x {frames} x {height} x {width}{clips} on {gpus} x {machine.gpu.name}: {duration(found.seconds)} "
            f"({parts}), {gib(found.bytes)} of {machine.gpu.memory_gib:g} GiB a GPU; a video takes {found.forwards} "
            f"forwards of the denoiser{' a clip' if clips else ''}, each branch of guidance by itself"
        )
    if config.low_noise is not None:
        lines[-1] += f"; {gib(denoisers_bytes(config))} of host memory for the two denoisers, one of them on the GPU"
    if len(requests) > 1:
        lines.append(f"all {sum(count for _, count in requests)} videos: {duration(total)}")
    lines[-1] += "; loading weights and writing files are not in it"
    return "\n".join([*lines, rates_words(machine, config)])


def denoisers_bytes(config: GenerateConfig) -> int:
    """Bytes of two denoisers' weights, which are in host memory between their uses."""
    return 2 * NUMBER_BYTES[config.dtype] * count_weights(config.model, 1).num_parameters


def _requests(config: GenerateConfig, prompts: Sequence[Prompt]) -> list[tuple[GenerateConfig, int]]:
    """Return the videos of these prompts in the groups that are made apart: a config for each, and how many
    they are."""
    if not prompts:
        return [(config, config.num_sample)]
    videos = [Video(prompt, 0, Path(), refs_of(prompt, config)) for prompt in prompts]
    found = []
    for group in alike(videos):
        first = group[0].prompt
        changes: dict[str, Any] = {"num_clips": len(first.clips), "strength": strength_of(first, config)}
        changes["companions"] = config.companions | dict(first.brings)
        if not config.use_t2i2v:
            changes["cond_type"] = kind_of(first, config) if group[0].refs else config.family.kind_of_nothing
        found.append((own_config(first, config).model_copy(update=changes), len(group) * config.num_sample))
    return found


def _degrees(config: GenerateConfig, gpus: int) -> tuple[list[int], int]:
    """Return the sequence degrees at which ranks may make a batch together, and the tensor degree."""
    *_, sequence, tensor = resolve_degrees(config.parallel, gpus)
    kind, found = denoiser_class(config.model), []

    def check(sequence: int, tensor: int) -> None:
        parallel = config.parallel.model_copy(update={"sequence": sequence})
        mesh = Mesh(1, gpus // sequence // tensor, sequence, tensor, 0, parallel, weights=None)
        mesh.check_model(kind, kind.heads(config.model))

    if says_degrees(config):
        check(sequence, tensor)
        return [sequence], tensor
    for degree in divisors(gpus):
        with suppress(UserError):
            check(degree, 1)
            found.append(degree)
    return found, 1


def _layout(config: GenerateConfig, gpus: int, sequence: int, tensor: int) -> Layout:
    return Layout(
        shard=gpus // sequence // tensor,
        sequence=sequence,
        tensor=tensor,
        compute_bytes=NUMBER_BYTES[config.dtype],
        compiled=config.compile is True,
        upkeep=Upkeep(lora=config.lora),
        sequence_attention=config.parallel.sequence_attention,
    )


def _batch(
    config: GenerateConfig, shape: tuple[int, int, int], size: int, layout: Layout, machine: Machine
) -> VideoForecast:
    """One batch on the ranks that make it together, which share tiles and captions."""
    option, rates, latent = config.sampling_option, machine.rates, config.ae.latent(*shape)
    held, rooms = _weights(config, layout), rooms_of(config, shape, size, layout)
    branches = branches_of(config, latent[1])
    batched = option.guidance_batch
    widest = max(branches)

    def total(width: int) -> int:
        moments = {**rooms, "denoise": rooms["denoise"] * width}
        if config.offload_model:
            return max(moments[name] + held[name] for name in moments)
        return sum(held.values()) + max(moments.values())

    if batched == "auto":
        batched = total(widest) <= machine.usable_bytes

    def forward(width: int) -> float:
        sizes = MicroBatch(size * width, latent, config.text_length)
        return forward_seconds(config.model, count_blocks(config.model, sizes, layout), layout, machine)

    denoise = sum(steps * (forward(n) if batched else n * forward(1)) for n, steps in branches.items())
    costs = encoding_costs(config, shape, size * min(2, widest))
    del costs["ae"]
    known = sum(autoencoder_cost(config.ae, one, size).flops for one in _known(config, shape))
    texts = sum(cost.rank_flops(layout.peers) for cost in costs.values())
    shared = layout.peers if on_meta(config.ae).compute is not None else 1
    parts = {
        "texts": texts / rates.products,
        "references": known / shared / rates.convolutions,
        "denoising": denoise,
        "decoding": _decoding(config.ae, shape, size)["flops"] / shared / rates.convolutions,
    }
    forwards = sum(n * steps for n, steps in branches.items())
    return VideoForecast(parts, total(widest if batched else 1), forwards)


def branches_of(config: GenerateConfig, frames: int) -> Counter[int]:
    """Return the steps by how many branches of guidance they run."""
    option, by_known = config.sampling_option, not config.knows_nothing and config.family.guided_by_known
    scales = guidance_scales(config, option, False, by_known)
    steps = max(1, round(option.num_steps * config.strength))
    return Counter(len(scales.coefficients(step, steps, frames)) for step in range(steps))


def _known(config: GenerateConfig, shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Pixels that are encoded of references: control videos, stills, and what the video is known by."""
    pixels = {"video": shape, "stills": (1, *shape[1:])}
    given = (one for one in config.sample_rules.companions if config.companions.get(one.name) and one.kind in pixels)
    found = [size for one in given for size in [pixels[one.kind]] * one.most]
    if config.knows_nothing or config.law_of_family is None:
        return found
    windows = config.law_of_family.windows(config.kind, config.ae.latent, shape[0])
    return found + [(len(window.pixels), *shape[1:]) for window in windows]


def _weights(config: GenerateConfig, layout: Layout) -> dict[str, int]:
    """Bytes of weights on a GPU by the phase that needs them, those that are gathered among the denoiser's."""
    counted = weights_of(config.model, layout)
    gathered = counted.most_gathered(layout.weight_shards, layout.zero)
    found = encoder_bytes(config, layout.gpus, decodes=True)
    autoencoder = found.pop("ae")
    denoiser = counted.frozen + layout.compute_bytes * (counted.owned + gathered)
    return {"texts": sum(found.values()), "denoise": int(denoiser), "decode": autoencoder}


def rooms_of(config: GenerateConfig, shape: tuple[int, int, int], size: int, layout: Layout) -> dict[str, int]:
    """Bytes of activations in each phase; denoising of one branch."""
    costs = encoding_costs(config, shape, size)
    del costs["ae"]
    peers = layout.sequence, layout.tensor, layout.sequence_attention
    dtype, latent = compute_dtype(layout.compute_bytes), config.ae.latent(*shape)
    forward = forward_bytes(config.model, tuple(latent), config.text_length, size, dtype, *peers)
    return {
        "texts": max((cost.rank_bytes(layout.peers) for cost in costs.values()), default=0),
        "denoise": max(forward.values()) + 4 * 4 * size * prod(latent),  # noise, the solver's states, the result
        "decode": _decoding(config.ae, shape, size)["bytes"],
    }


@lru_cache(maxsize=64)
def _decoding(section: Any, shape: tuple[int, int, int], batch: int) -> Mapping[str, int]:
    """FLOPs of decoding on one rank, and bytes at the worst moment, by a trace that is kept."""

    def look() -> dict[str, int]:
        autoencoder = on_meta(section)
        latents = torch.empty(batch, *autoencoder.latent(*shape), device="meta")
        parts = (*autoencoder.encoding.values(), *autoencoder.decoding.values())
        with torch.no_grad(), Trace(*parts) as trace:
            for _ in autoencoder.decode_stream(latents, shape[0]):
                pass
        return {"flops": trace.flops, "bytes": trace.peak}

    return traced_before("decodings", look, facts_of(section), section.model_dump(mode="json"), shape, batch)
