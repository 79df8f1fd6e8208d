"""Training examples: a batch becomes noised latents and conditions; and the windows that a store must have for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import (
    Batch,
    Bucket,
    Conditions,
    Draw,
    Known,
    LatentShape,
    Noised,
    Places,
    UserError,
    Window,
)
from longtake.data.clips.transforms import to_unit
from longtake.data.latents.source import LatentSource
from longtake.data.latents.store import of_window
from longtake.data.rules import MASK, Companion
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.known import (
    KNOWN_NOISE,
    NOTHING_KNOWN,
    KnownLaw,
    keep_known,
    make_known,
    noise_on_known,
    read_known,
)
from longtake.random import Purpose
from longtake.system.build import System
from longtake.system.config import SystemConfig

Weights = Mapping[str, float]  # kind of known places -> weight

DROPOUT = "dropout"


def wanted_draws(config: SystemConfig, draws: Mapping[str, Draw], posterior: bool) -> dict[str, Draw]:
    """Return the random numbers that training wants of each sample: the objective's `draws`, those of the conditions
    and, with `posterior`, those that latents are drawn with."""
    found = dict(draws)
    found[DROPOUT] = Draw(Purpose.DROPOUT, "uniform", (len(config.family.texts),))  # in the order of the encoders
    if posterior:
        found["posterior"] = Draw(Purpose.POSTERIOR, "normal", "latent")
        for number, companion in enumerate(config.sample_rules.companions):
            if companion.kind == "video":
                found[_posterior(companion)] = Draw(Purpose.COMPANION_POSTERIOR + number, "normal", "latent")
    if (law := config.known_law) is not None:
        found |= law.draws
    return found


@dataclass(frozen=True)
class KnownDraw:
    """Draws what is known of samples, by kinds and their weights; for data workers."""

    law: KnownLaw
    kinds: Weights
    latent: LatentShape

    @classmethod
    def create(cls, law: KnownLaw | None, kinds: Weights | None, latent: LatentShape) -> KnownDraw | None:
        """None where nothing is known of any sample."""
        return None if law is None or kinds is None else cls(law, kinds, latent)

    def __call__(self, choices: Mapping[str, np.ndarray], shape: tuple[int, int, int]) -> dict[int, Places]:
        """Of clips (T, H, W), by rows; samples of which nothing is known are left out."""
        drawn = enumerate(self.law.drawn(choices, self.kinds, self.latent, shape))
        return {row: places for row, places in drawn if places.windows}

    def num_bytes(self, shape: tuple[int, int, int]) -> int:
        """Return the most that the masks of one sample take."""
        windows = windows_apart(self.law, self.kinds, self.latent, shape[0])
        return math.prod(shape) if any(window.masked for window in windows.values()) else 0


@dataclass(frozen=True)
class CleanExample:
    """A batch as the denoiser knows it, still without noise."""

    latents: Tensor  # float32 [B, C, F, h, w]
    conditions: Conditions
    known: Known | None
    draws: Mapping[str, Tensor]  # on the device
    weights: Tensor  # [B], on the device
    shape: tuple[int, int, int]  # (T, H, W) of its pixels

    @torch.no_grad()
    def noised(
        self, system: System, leave_out_known: bool = False, level: float | None = None
    ) -> tuple[Noised, Conditions]:
        """Return the denoiser's inputs and its target: the example with the noise and at the times of its draws, or at
        one noise level (`Objective.noise`). leave_out_known: known positions do not count in the loss, whatever the
        family's default."""
        noised = system.objective.noise(self.latents, self.draws, self.weights, self.shape, level)
        conditions = self.conditions
        if self.known is not None:
            loss = "loss_at_ends" if "loss_at_ends" in system.config.quirks else "loss"
            readers = system.config.family.readers(system.config.model) | ({loss} if leave_out_known else frozenset())
            noised, conditions = read_known(noised, conditions, self.known, readers, system.objective.noise_time)
        return noised, conditions


@torch.no_grad()
def clean_example(
    system: System,
    batch: Batch,
    nothing: Conditions,
    weights: Tensor,
    dropout: Mapping[str, float] | None = None,
) -> CleanExample:
    """Return the latents and conditions of a batch.

    nothing: the conditions that stand for no text. weights: [B], on the device. dropout: condition -> share of samples
    without it.
    """
    draws = {name: draw.to(system.device, non_blocking=True) for name, draw in batch.draws.items()}
    latents = system.encode(batch)
    conditions = system.conditions(batch)
    texts = system.config.family.texts
    uniforms = {text.condition: draws[DROPOUT][:, i] for i, text in enumerate(texts)} if dropout else {}
    conditions = drop_text(conditions, nothing, uniforms, dropout or {})
    conditions = conditions.updated(**system.facts_of(batch.bucket.shape, batch.fps, batch.size))
    if companions := companions_of_batch(system, batch):
        conditions = conditions.updated(companions.masks, **companions)
    known = None
    if system.law is not None:
        known = keep_known(known_of_batch(system, batch, latents), weights)
        conditions = conditions.updated(**system.known_conditions(known))
    return CleanExample(latents, conditions, known, draws, weights, batch.bucket.shape)


def companions_of_batch(system: System, batch: Batch) -> Conditions:
    """Return the auxiliary inputs of clips as conditions, float32 on the device: a video's latents [B, C, F, h, w],
    drawn as the clip's; numbers [B, T, width]; latents of images [B, most, C, 1, h, w], with a mask of those that
    exist."""
    kinds = system.config.sample_rules.companions
    found: Mapping[str, Tensor] = batch.encoded
    if kinds and not batch.encoded:
        found = system.own_encoders.companions(kinds, batch.companions)
    return companion_conditions(
        system, kinds, found, lambda one, posterior: system.draw_latents(posterior, batch.draws.get(_posterior(one)))
    )


def companion_conditions(
    system: System,
    kinds: Sequence[Companion],
    found: Mapping[str, Tensor],
    draw: Callable[[Companion, Mapping[str, Tensor]], Tensor],
) -> Conditions:
    """Return the results of `Encoders.companions` as conditions; `draw`: latents from a companion's posterior."""
    tensors, masks = {}, {}
    for one in kinds:
        if one.kind == "numbers":
            tensors[one.condition] = found[one.name].to(system.device, torch.float32, non_blocking=True)
            continue
        tensors[one.condition] = draw(one, _posterior_of(found, one.name))
        if one.kind == "stills":
            masks[one.condition] = found[one.name + MASK].to(system.device, non_blocking=True)
    return Conditions(tensors, masks)


def _posterior(companion: Companion) -> str:
    """Return the name of the numbers with which a companion's latents are drawn."""
    return f"posterior.{companion.name}"


def known_of_batch(system: System, batch: Batch, latents: Tensor) -> Known:
    """Return the known values of the samples of a batch with latents [B, C, F, h, w]; a random posterior is drawn from
    with the sample's own numbers at the known positions, as for its latents.

    The windows are on the CPU, so the device is not waited for; ranks run the autoencoder unequally often.
    """
    given = with_drawn_noise(batch)

    def encode(rows: Sequence[int], window: Window) -> Tensor:
        if batch.encoded:
            stored = _posterior_of(batch.encoded, window.name)
            posterior = {moment: torch.stack([value[row] for row in rows]) for moment, value in stored.items()}
        else:
            frames = slice(window.pixels.start, window.pixels.stop)
            pixels = torch.stack([batch.video[row, :, frames] for row in rows])
            posterior = system.own_encoders.posterior(black_out(pixels, window, [given[row] for row in rows]))
        normal = None
        if "std" in posterior:
            frames = slice(window.frames.start, window.frames.stop)
            normal = torch.stack([batch.draws["posterior"][row, :, frames] for row in rows])
        return system.draw_latents(posterior, normal)

    return make_known(given, latents, batch.bucket.shape, encode)


def with_drawn_noise(batch: Batch) -> list[Places]:
    """Conditioning masks of each sample of a batch, with the noise on given pixels that it asks for."""
    normals = batch.draws.get(KNOWN_NOISE)
    each = [batch.known.get(row, NOTHING_KNOWN) for row in range(len(batch.weights))]
    return [noise_on_known(one, None if normals is None else normals[row]) for row, one in enumerate(each)]


def black_out(pixels: Tensor, window: Window, given: Sequence[Places]) -> Tensor:
    """Return the pixels [n, 3, t, H, W] of a window of some samples, `Window.fill` where they are masked; they may be
    changed."""
    if not window.masked:
        return pixels
    pixels, frames = to_unit(pixels), slice(window.pixels.start, window.pixels.stop)
    for own, one in zip(pixels, given, strict=True):
        if one.mask is not None:
            own.masked_fill_(one.mask[:, frames].to(own.device) > 0, window.fill)
        if one.noise is not None:
            own += one.noise[:, frames].to(own.device) * (own > -1)
    return pixels


def _posterior_of(encoded: Mapping[str, Tensor], window: str) -> dict[str, Tensor]:
    """ "mean", and "std" of a random posterior, of a window or a companion in what a latent store has of a batch."""
    names = {moment: of_window(window, moment) for moment in ("mean", "std")}
    return {moment: encoded[name] for moment, name in names.items() if name in encoded}


def windows_apart(law: KnownLaw, kinds: Weights | None, latent: LatentShape, num_frames: int) -> dict[str, Window]:
    """Return, by name, the windows of clips of `num_frames` frames that kinds make known and that are encoded from
    separate pixels; empty where such clips are too short. Two kinds may share a window."""
    found: dict[str, Window] = {}
    for kind, weight in (kinds or {}).items():
        if weight > 0:
            found |= {window.name: window for window in law.windows(kind, latent, num_frames) if window.name}
    return found


def kinds_apart(config: SystemConfig, kinds: Weights | None, latent: LatentShape) -> tuple[str, ...]:
    """Return the kinds that a run trains on of which something is encoded apart from the clip, where it is
    long enough."""
    if (law := config.law_of_family) is None:
        return ()
    long, trained = latent.pixel_frames(2**16), [kind for kind in law.kinds if (kinds or {}).get(kind, 0) > 0]
    return tuple(kind for kind in trained if windows_apart(law, {kind: 1}, latent, long))


def windows_of(
    config: SystemConfig, kinds: Weights | None, buckets: Sequence[Bucket], latent: LatentShape
) -> dict[int, dict[str, Window]]:
    """Frames of a clip -> the windows that are encoded apart, by name; lengths without any are left out."""
    law = config.law_of_family
    lengths = sorted({bucket.shape[0] for bucket in buckets}) if law else ()
    return {length: found for length in lengths if (found := windows_apart(law, kinds, latent, length))}


def any_masked(windows: Mapping[int, Mapping[str, Window]]) -> bool:
    """Return whether pixels of some windows are blacked out, by draws of each sample."""
    return any(window.masked for of_length in windows.values() for window in of_length.values())


def stored_windows(
    config: SystemConfig, kinds: Weights | None, buckets: Sequence[Bucket], store: LatentSource
) -> dict[int, tuple[str, ...]]:
    """Frames of a clip -> names of the windows that a run needs of a latent store. Raises `UserError` that names the
    kinds whose windows the store has not."""
    latent, law = store.encoders.latent, config.law_of_family
    wanted = windows_of(config, kinds, buckets, latent)
    lacking = [
        kind
        for kind in kinds_apart(config, kinds, latent)
        if any(windows_apart(law, {kind: 1}, latent, length).keys() - store.windows(length).keys() for length in wanted)
    ]
    if lacking:
        has = f"that of {', '.join(store.kinds)} only" if store.kinds else "whole clips only"
        raise UserError(
            f"dataset.latents = {store.place!r}: condition_config asks for {', '.join(lacking)}, whose frames "
            f"are encoded apart, and the store holds {has}; run `longtake data encode RUN -o FOLDER` with this "
            "condition_config and another folder, or set dataset.latents to None to encode while training"
        )
    return {length: tuple(windows) for length, windows in wanted.items()}
