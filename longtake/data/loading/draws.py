"""The random numbers of a slot's samples, made where the sample is made: pure functions of what they are about."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import LatentShape, Slot
from longtake.random import Purpose, normals, uniforms


def view_of(pass_index: int, views: int) -> int:
    """The pass that stands in the pixel draws (window, crop, caption, mask): `pass mod views`, or the pass itself."""
    return pass_index % views if views > 0 else pass_index


def window_draws(slot: Slot, seed: int, stage: int, views: int = 0) -> np.ndarray:
    """Where each sample's window lies: uniform, float32 [B]."""
    return uniforms(seed, stage, Purpose.WINDOW, view_of(slot.pass_index, views), slot.samples, 1)[:, 0]


def caption_columns(
    slot: Slot, captions: Mapping[str, float] | None, seed: int, stage: int, views: int = 0
) -> list[tuple[str, ...]]:
    """The caption columns of each sample in the order in which they are tried: the drawn one, then the rest as written.

    `captions`: column -> probability, on any scale; None: the column `text`.
    """
    if captions is None or len(captions) == 1:
        return [tuple(captions or ("text",))] * len(slot.samples)
    names = tuple(captions)
    ends = np.cumsum(list(captions.values()))
    drawn = uniforms(seed, stage, Purpose.CAPTION, view_of(slot.pass_index, views), slot.samples, 1)[:, 0]
    places = np.searchsorted(ends, drawn * ends[-1], side="right")
    return [(names[place], *(name for name in names if name != names[place])) for place in places.tolist()]


def draw(
    slot: Slot, seed: int, stage: int, latent: LatentShape, views: int = 0, posterior: bool = False
) -> dict[str, Tensor]:
    """The numbers the trainer needs for one slot, float32 on the CPU, B = samples of the slot:

    - `noise` [B, C, F, h, w] standard normal, for the whole latent before any cut;
    - `timestep` [B] standard normal, which the timestep law maps to a time;
    - `dropout` [B, 2] uniform: token embeddings, pooled embedding;
    - `mask` [B] uniform: the kind of condition (the same for equal views);
    - `posterior` [B, C, F, h, w] standard normal, only if asked for: the draw from the autoencoder's posterior.
    """
    shape = (len(slot.samples), *latent(*slot.bucket.shape))
    count = int(np.prod(shape[1:]))

    def normal(purpose: Purpose, count: int) -> np.ndarray:
        return normals(seed, stage, purpose, slot.pass_index, slot.samples, count)

    mask = uniforms(seed, stage, Purpose.MASK, view_of(slot.pass_index, views), slot.samples, 1)
    numbers = {
        "noise": normal(Purpose.NOISE, count).reshape(shape),
        "timestep": normal(Purpose.TIMESTEP, 1)[:, 0],
        "dropout": uniforms(seed, stage, Purpose.DROPOUT, slot.pass_index, slot.samples, 2),
        "mask": mask[:, 0],
    }
    if posterior:
        numbers["posterior"] = normal(Purpose.POSTERIOR, count).reshape(shape)
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in numbers.items()}
