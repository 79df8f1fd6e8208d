"""The random numbers of a slot's samples, made where the sample is made: pure functions of what they are about."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from longtake.buckets.protocol import view_of
from longtake.contracts import Bucket, Draw, LatentShape, Slot
from longtake.random import Purpose, normals, uniforms, words


def window_draws(slot: Slot, seed: int, stage: int, views: int = 0) -> np.ndarray:
    """Where each sample's window lies: uniform, float32 [B]."""
    return uniforms(seed, stage, Purpose.WINDOW, view_of(slot.pass_index, views), slot.samples, 1)[:, 0]


def caption_columns(
    slot: Slot, captions: Mapping[str, float] | None, seed: int, stage: int, views: int = 0
) -> list[tuple[str, ...]]:
    """Return the caption columns of each sample in the order in which they are tried: the drawn one, then the rest as
    written.

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
    slot: Slot, seed: int, stage: int, latent: LatentShape, wanted: Mapping[str, Draw], views: int = 0
) -> dict[str, Tensor]:
    """Return the numbers that training wants of the samples of a slot, by name, on the CPU: [B, *shape of one].

    Normal and uniform numbers are float32, integers int64. Noise is drawn for the whole latent, before any cut.
    """
    shapes = _shapes(latent, slot.bucket)
    return {name: torch.from_numpy(_drawn(slot, seed, stage, shapes, one, views)) for name, one in wanted.items()}


def draw_bytes(latent: LatentShape, bucket: Bucket, wanted: Mapping[str, Draw]) -> int:
    """Bytes of one sample's draws that are as large as its latents or pixels."""
    shapes = _shapes(latent, bucket)
    return 4 * sum(math.prod(shapes[one.shape]) for one in wanted.values() if isinstance(one.shape, str))


def _shapes(latent: LatentShape, bucket: Bucket) -> dict[str, tuple[int, ...]]:
    return {"latent": latent(*bucket.shape), "pixels": (3, *bucket.shape)}


def _drawn(
    slot: Slot, seed: int, stage: int, shapes: Mapping[str, tuple[int, ...]], wanted: Draw, views: int
) -> np.ndarray:
    shape = shapes[wanted.shape] if isinstance(wanted.shape, str) else wanted.shape
    moment = view_of(slot.pass_index, views) if wanted.of_view else slot.pass_index
    key = seed, stage, wanted.purpose, moment, slot.samples, math.prod(shape)
    if wanted.law == "normal":
        numbers = normals(*key)
    elif wanted.law == "uniform":
        numbers = uniforms(*key)
        if wanted.stratified:
            numbers = ((numbers.astype(np.float64) + slot.number) / slot.num_slots).astype(np.float32)
            numbers = np.minimum(numbers, np.float32(1 - 2**-24))  # rounding must not reach 1
    else:
        numbers = words(*key).astype(np.uint64)
        strata = slot.num_slots if wanted.stratified else 1
        place = (np.uint64(slot.number if wanted.stratified else 0) << np.uint64(32)) + numbers
        numbers = (place * np.uint64(wanted.below) // (np.uint64(strata) << np.uint64(32))).astype(np.int64)
    return np.ascontiguousarray(numbers.reshape(len(slot.samples), *shape))
