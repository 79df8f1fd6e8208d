"""Known frames of a training batch: which samples know which frames, and what the autoencoder makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longtake.contracts import Batch, Conditions, LatentShape, UserError
from longtake.diffusion import ConditionConfig, Window, draw_kinds, keep_samples, needs_pixels, visual_condition
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
        assert system.encoders is not None, "stored latents hold no known frames"
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


def refuse_unstored_kinds(config: ConditionConfig | None, latent: LatentShape, store: str) -> None:
    """Raises `UserError` where a kind of known frames needs pixels, which a run from stored latents has not."""
    kinds = [] if config is None else [kind for kind, weight in config.weights.items() if weight > 0]
    if lacking := [kind for kind in kinds if needs_pixels(kind, latent)]:
        raise UserError(
            f"dataset.latents = {store!r}: condition_config asks for {', '.join(lacking)}, whose frames are encoded "
            "apart, and the store holds whole clips only; set dataset.latents to None to encode while training"
        )
