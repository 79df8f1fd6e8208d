"""What is known of samples beforehand: the laws that choose it in training, and what the denoiser sees of it.

A family has one law, which says by `Places` what is known of each sample: in training it draws them, in generation a
request names a kind, or brings places of its own, and their pixels. `make_known` makes a `Known` of latents of either;
who reads it, the family says as well (`Reader`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol

from longtake.contracts import Conditions, Draw, Known, LatentShape, Noised, Places, Window
from longtake.random import Purpose

if TYPE_CHECKING:  # the check of a config asks for windows alone
    import numpy as np
    from torch import Tensor

    from longtake.diffusion.solvers import Hold

# What reads `Known`: the input (held places keep their clean values), a condition `x_mask` (`frames_to_make`), the loss
# (held places do not count; or of these the first and last frame alone, and only where no frame between them is held).
# Channels and other conditions are made by the law itself (`KnownLaw.conditions`).
Reader = Literal["input", "x_mask", "loss", "loss_at_ends"]
PixelShape = tuple[int, int, int]  # (T, H, W)


@dataclass(frozen=True)
class Refs:
    """The references of a request."""

    frames: tuple[float, ...] = (math.inf,)  # how many each has, at the model's rate
    carried: bool = False  # windows without a reference of their own take the clip before


ONE_REF = Refs()
NOTHING_KNOWN = Places()
KNOWN_NOISE = "known_noise"  # of a law's draws: standard normals [3, T, H, W] for `Places.noise`
# encode(rows, window) -> latents [len(rows), C, len(window.frames), h, w]: what the autoencoder makes of the window's
# pixels of these samples of the batch, and of nothing else.
Encode = Callable[[Sequence[int], Window], "Tensor"]


class KnownLaw(Protocol):
    """Which places of samples are known, and what a denoiser sees of them."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """Description of each kind by its name; the first makes nothing known."""

    @property
    def draws(self) -> Mapping[str, Draw]:
        """Draws that `drawn` is given, all of them choices, and `KNOWN_NOISE`; of the view where pixels are masked."""

    @property
    def needs_mask(self) -> frozenset[str]:
        """Kinds that know nothing of a video to be generated but by a request's mask."""

    def drawn(
        self, choices: Mapping[str, np.ndarray], weights: Mapping[str, float], latent: LatentShape, shape: PixelShape
    ) -> list[Places]:
        """Conditioning masks of each sample of clips (T, H, W), kinds drawn by weight. Called in data workers."""

    def given(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None = None, refs: Refs = ONE_REF
    ) -> Places:
        """What a kind makes known of a video to be generated. mask: of a request, for kinds whose windows want one.
        refs: of its references."""

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
        """Return the frames that a kind takes of a clip; empty where it knows nothing, or the clip is too
        short for it."""

    def continued(self, kind: str, carries: str, clip: int) -> str:
        """Return the kind of a video's clip of that number, from 1, which carries on the one before by `carries`;
        `kind`: of the first."""

    def conditions(self, known: Known) -> Mapping[str, Tensor]:
        """Return the denoiser's own conditions that are made of it."""


class ByKind(ABC):
    """A `KnownLaw` that draws a kind for each sample by weight, and `numbers` for what the kind leaves open."""

    kinds: Mapping[str, str]
    numbers: int = 0
    needs_mask: frozenset[str] = frozenset()

    def __init__(self, model: Any = None, ae: Any = None) -> None:
        self.model, self.ae = model, ae  # the sections of a run

    @property
    def draws(self) -> Mapping[str, Draw]:
        shape = (1 + self.numbers,) if self.numbers else ()
        return {"mask": Draw(Purpose.MASK, "uniform", shape, of_view=True, is_choice=True)}

    def drawn(
        self, choices: Mapping[str, np.ndarray], weights: Mapping[str, float], latent: LatentShape, shape: PixelShape
    ) -> list[Places]:
        drawn = choices["mask"].reshape(len(choices["mask"]), 1 + self.numbers)
        # In the order of `kinds`, however the weights were written.
        kinds = kinds_by_weight(drawn[:, 0], {kind: weights[kind] for kind in self.kinds if weights.get(kind, 0) > 0})
        pairs = zip(kinds, drawn[:, 1:].tolist(), strict=True)
        return [self.places(kind, latent, shape, None, numbers) for kind, numbers in pairs]

    def given(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None = None, refs: Refs = ONE_REF
    ) -> Places:
        return self.places(kind, latent, shape, mask, [0.0] * self.numbers)

    def continued(self, kind: str, carries: str, clip: int) -> str:
        return carries

    @abstractmethod
    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
        """As `KnownLaw.windows`."""

    def places(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None, numbers: Sequence[float]
    ) -> Places:
        """What a kind makes known of a clip (T, H, W); `numbers`: in [0, 1), 0 in generation; `mask`: of a request."""
        return Places(self.windows(kind, latent, shape[0]))


def noise_on_known(places: Places, normal: Tensor | None) -> Places:
    """Places with the noise that they ask for; normal: standard normals [3, T, H, W]."""
    if not places.noise_level or normal is None:
        return places
    return replace(places, noise=normal * places.noise_level, noise_level=0.0)


def with_box(shape: PixelShape, place: Sequence[float], share: float = 0.5) -> Tensor:
    """Float32 [1, T, H, W]: 0 in a box in all frames, 1 elsewhere. `place`: how far down and to the right of all places
    that it may have, in [0, 1); `share`: of height and width."""
    import torch

    mask = torch.ones(1, *shape)
    high, wide = (int(share * side) for side in shape[1:])
    top, left = (int(u * (side - own + 1)) for u, side, own in zip(place, shape[1:], (high, wide), strict=True))
    mask[..., top : top + high, left : left + wide] = 0
    return mask


def kinds_by_weight(uniforms: np.ndarray, weights: Mapping[str, float]) -> list[str]:
    """Return the kind that each uniform number [B] draws, by weights above 0."""
    kinds, ends = list(weights), list(accumulate(weights.values()))
    return [kinds[min(bisect_right(ends, u * ends[-1]), len(kinds) - 1)] for u in uniforms.tolist()]


def make_known(given: Sequence[Places], latents: Tensor, shape: PixelShape, encode: Encode, own: bool = True) -> Known:
    """What is known of a batch with latents [B, C, F, h, w] of clips (T, H, W); `encode` is called once for each
    different window, with all samples that know it.

    own: False where `latents` have the shape alone, as in generation; then every window is encoded. The device is not
    waited for where the tensors of `given` are on it.
    """
    import torch

    released, values = latents.new_ones(len(latents), 1, latents.shape[2], 1, 1), latents.new_zeros(latents.shape)
    rows_of: dict[Window, dict[int, int]] = {}  # window -> sample -> its place among those that know the window
    for row, one in enumerate(given):
        for window in one.windows:
            rows = rows_of.setdefault(window, {})
            rows.setdefault(row, len(rows))
    encoded = {
        window: encode(list(rows), window) if window.name or not own else None for window, rows in rows_of.items()
    }
    # of windows that overlap the sample's later one counts, whatever order other samples have them in
    for row, one in enumerate(given):
        for window in one.windows:
            places, known = slice(window.frames.start, window.frames.stop), encoded[window]
            released[row, :, places] = 0
            clean = latents[row, :, places] if known is None else known[rows_of[window][row]]
            values[row, :, places] = clean.to(values)
    placed = {row: one.released for row, one in enumerate(given) if one.released is not None}
    if placed:
        released = released.expand(-1, -1, -1, *map(max, *(one.shape[2:] for one in placed.values()), (1, 1))).clone()
    for row, one in placed.items():
        released[row] = one.to(released)
        if given[row].mask is None:  # of pixels that are blacked out, all latents count
            values[row] = values[row].where(released[row] < 1, 0.0)
    masks = {row: one.mask for row, one in enumerate(given) if one.mask is not None}
    pixels = latents.new_ones(len(latents), 1, *shape, dtype=torch.bool) if masks else None
    for row, mask in masks.items():
        pixels[row] = mask.to(pixels)
    return Known(released, values, pixels)


def keep_known(known: Known, weights: Tensor) -> Known:
    """Without the samples of weight 0, so that not even a value that is not finite is passed on; weights: [B]."""
    trains = (weights > 0)[:, None, None, None, None].to(known.latents.device)
    pixels = None if known.pixels is None else known.pixels | ~trains
    return Known(known.released.where(trains, 1.0), known.latents.where(trains, 0.0), pixels)


def with_held(x: Tensor, known: Known) -> Tensor:
    """x [B, C, F, h, w] with the clean values at the places that are known to the end, exactly."""
    return known.latents.to(x).where(known.held, x)


def frames_to_make(held: Tensor) -> Tensor:
    """bool [B, F], False where a whole frame is held; held: bool, as `Known.held`."""
    return ~held[:, 0].flatten(2).all(2)


def read_known(
    noised: Noised, conditions: Conditions, known: Known, readers: frozenset[Reader], noise_time: float
) -> tuple[Noised, Conditions]:
    """Return a training example as a family's readers of `Known` want it; noise_time: the objective's."""
    held = known.held_at(noised.t[:, None, None, None, None] / noise_time)
    if "input" in readers:
        noised = replace(noised, x=known.latents.to(noised.x).where(held, noised.x))
    if "x_mask" in readers:
        conditions = conditions.updated(x_mask=frames_to_make(held))
    if "loss" in readers:
        noised = replace(noised, counted=(~held).to(noised.target))
    if "loss_at_ends" in readers:
        noised = replace(noised, counted=(~_held_ends(held)).to(noised.target))
    return noised, conditions


def known_holder(
    known: Known, noise: Tensor, noised_at: Callable[[Tensor, Tensor, Tensor], Tensor], noise_time: float
) -> Hold:
    """What keeps known places at their clean values until they are released, with noise of that time, as x walks on.

    noised_at, noise_time: the objective's.
    """
    before = known.released < 1

    def hold(x: Tensor, t: Tensor) -> Tensor:
        nonlocal before
        held, clean = known.held_at(t / noise_time), known.latents.to(x)
        x = noised_at(clean, noise, t).where(before & ~held, x)
        before = held
        return clean.where(held, x)

    return hold


def _held_ends(held: Tensor) -> Tensor:
    """Of `held` [B, 1, F, ...], the first and the last frame, in samples where no frame between them is held."""
    ends = held.clone()
    ends[:, :, 1:-1] = False
    alone = ~held[:, :, 1:-1].flatten(1).any(1)
    return ends & alone.view(-1, *[1] * (held.ndim - 1))
