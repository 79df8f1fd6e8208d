"""Known frames of a training batch: which samples know which frames, and what the autoencoder makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longtake.contracts import Batch, Bucket, Conditions, LatentShape, UserError
from longtake.data import LatentStore, of_window
from longtake.diffusion import (
    ConditionConfig,
    Window,
    draw_kinds,
    keep_samples,
    known_windows,
    needs_pixels,
    visual_condition,
)
from longtake.system.build import System


def add_known_frames(
    system: System,
    conditions: Conditions,
    batch: Batch,
    latents: Tensor,
    weights: Tensor,
    config: ConditionConfig | None,
) -> Conditions:
    """Adds the visual condition of a batch, [B, 1 + C, F, h, w], where the model wants one.

    latents: [B, C, F, h, w], of the batch. weights: [B], on the device. Without a config nothing is known. The kinds
    come from numbers that are on the CPU, so the device is not waited for; how often the autoencoder runs depends on
    them and differs between ranks. A random posterior is drawn from with the sample's own numbers at the known places,
    as for its latents.
    """
    if config is None or not system.config.model.cond_embed:
        return system.blank_visual(conditions, latents)
    num_frames = batch.bucket.shape[0]
    kinds = draw_kinds(batch.kind_draws, config, system.latent, num_frames)

    def encode(rows: Sequence[int], window: Window) -> Tensor:
        if batch.encoded:
            moments = _stored_moments(batch.encoded, window_name(window), rows)
        else:
            assert system.encoders is not None, "this system was built for stored latents"
            assert window.pixels is not None
            pixels = slice(window.pixels.start, window.pixels.stop)
            moments = system.encoders.moments(torch.stack([batch.video[row, :, pixels] for row in rows]))
        normal = None
        if "std" in moments:
            frames = slice(window.frames.start, window.frames.stop)
            normal = torch.stack([batch.draws["posterior"][row, :, frames] for row in rows])
        return system.draw_latents(moments, normal)

    visual = visual_condition(latents, kinds, system.latent, num_frames, encode)
    return replace(conditions, visual=keep_samples(visual, weights))


def _stored_moments(encoded: Mapping[str, Tensor], window: str, rows: Sequence[int]) -> dict[str, Tensor]:
    """The moments of a window of some samples, of those that a latent store has for the batch."""
    names = {moment: of_window(window, moment) for moment in ("mean", "std")}
    return {
        moment: torch.stack([encoded[name][row] for row in rows]) for moment, name in names.items() if name in encoded
    }


def window_name(window: Window) -> str:
    """What a window is called in a latent store: "head1", "tail9"; its end of the clip and its latent frames."""
    return f"{'tail' if window.frames.start else 'head'}{len(window.frames)}"


def kinds_apart(config: ConditionConfig | None, latent: LatentShape) -> tuple[str, ...]:
    """The kinds of known frames that a run trains on whose latents are encoded apart from the clip's."""
    kinds = () if config is None else config.weights.items()
    return tuple(kind for kind, weight in kinds if weight > 0 and needs_pixels(kind, latent))


def windows_apart(kinds: Sequence[str], latent: LatentShape, num_frames: int) -> dict[str, Window]:
    """By name, what kinds make known of clips of `num_frames` frames and is encoded from pixels of its own.

    Empty where such clips are too short for all of them. Two kinds may share a window.
    """
    windows = [window for kind in kinds for window in known_windows(kind, latent, num_frames)]
    return {window_name(window): window for window in windows if window.pixels is not None}


def windows_of(
    config: ConditionConfig | None, buckets: Sequence[Bucket], latent: LatentShape
) -> dict[int, dict[str, Window]]:
    """Frames of a clip -> the windows that are encoded apart, by name; lengths without any are left out."""
    kinds = kinds_apart(config, latent)
    lengths = sorted({bucket.shape[0] for bucket in buckets})
    return {length: found for length in lengths if (found := windows_apart(kinds, latent, length))}


def stored_windows(
    config: ConditionConfig | None, buckets: Sequence[Bucket], store: LatentStore
) -> dict[int, tuple[str, ...]]:
    """Frames of a clip -> names of the windows that a run needs of a latent store.

    Raises `UserError` that names the kinds whose windows the store has not.
    """
    latent = store.encoders.latent
    wanted = windows_of(config, buckets, latent)
    lacking = [
        kind
        for kind in kinds_apart(config, latent)
        if any(windows_apart([kind], latent, length).keys() - store.windows(length).keys() for length in wanted)
    ]
    if lacking:
        has = f"that of {', '.join(store.kinds)} only" if store.kinds else "whole clips only"
        raise UserError(
            f"dataset.latents = {str(store.folder)!r}: condition_config asks for {', '.join(lacking)}, whose frames "
            f"are encoded apart, and the store holds {has}; run `longtake data encode` with this condition_config "
            "into another folder (-o), or set dataset.latents to None to encode while training"
        )
    return {length: tuple(windows) for length, windows in wanted.items()}
