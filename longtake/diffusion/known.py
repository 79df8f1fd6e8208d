"""What is known of samples beforehand: the laws that choose it in training, and what the denoiser sees of it.

A family has one law. It makes a `Known` of latents, the same in training, where kinds are drawn, and in generation,
where a request names one and brings the pixels; who reads it, the family says as well (`Reader`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from longtake.contracts import Draw, Known, LatentShape, Noised

if TYPE_CHECKING:  # the check of a config asks for windows alone
    import numpy as np
    from torch import Tensor

# What reads `Known`: the input (held places keep their clean values), the times (0 at held frames), the loss (held
# places do not count; or of these the first and last frame alone, and only where no frame between them is held).
# Channels and other conditions are made by the law itself (`KnownLaw.conditions`).
Reader = Literal["input", "times", "loss", "loss_at_ends"]
Given = Any  # what is known of one sample, in its law's own form: a kind, a mask
PixelShape = tuple[int, int, int]  # (T, H, W)


@dataclass(frozen=True)
class Window:
    """Frames of a clip that follow each other and are known."""

    frames: range  # of the clip's latents
    pixels: range  # frames of the clip that they are encoded from
    apart: bool = True  # encoded as a clip of their own; False: the clip's own latents are the same, and are taken

    @property
    def is_head(self) -> bool:
        """Whether it begins with the clip; otherwise it ends with it."""
        return self.frames.start == 0


# encode(rows, window, masks) -> latents [len(rows), C, len(window.frames), h, w]: what the autoencoder makes of the
# window's pixels of these samples of the batch, and of nothing else. masks: float32 [len(rows), 1, T, H, W], 1 where
# pixels are blacked out first; None: nowhere.
Encode = Callable[[Sequence[int], Window, "Tensor | None"], "Tensor"]


class KnownLaw(Protocol):
    """Which places of samples are known, and what a denoiser sees of them."""

    kinds: Mapping[str, str]  # kind -> what it makes known; the first makes nothing known
    stills: frozenset[str]  # kinds that take single frames
    draws: Mapping[str, Draw]  # that `drawn` is given, all of them choices

    def drawn(
        self, choices: Mapping[str, np.ndarray], weights: Mapping[str, float], latent: LatentShape, shape: PixelShape
    ) -> list[Given]:
        """What is known of each training sample of clips (T, H, W), kinds drawn by weight."""

    def given(self, kind: str, latent: LatentShape, shape: PixelShape) -> Given:
        """What a kind makes known of a video to be generated."""

    def windows(self, kind: str, latent: LatentShape, num_frames: int) -> tuple[Window, ...]:
        """The frames that a kind takes of a clip; empty where it knows nothing, or the clip is too short for it."""

    def apart(self, kind: str, latent: LatentShape, num_frames: int) -> Mapping[str, Window]:
        """By name, what a latent store must hold beside the clip's own latents for this kind."""

    def known(
        self,
        given: Sequence[Given],
        latents: Tensor,
        latent: LatentShape,
        shape: PixelShape,
        encode: Encode,
        own: bool = True,
    ) -> Known:
        """What is known of a batch with latents [B, C, F, h, w]; `encode` is called once for each different window.

        own: False where `latents` have the shape alone, as in generation; then every window is encoded.
        """

    def conditions(self, known: Known) -> Mapping[str, Tensor]:
        """The denoiser's own conditions that are made of it."""


def keep_known(known: Known, weights: Tensor) -> Known:
    """Without the samples of weight 0, so that not even a value that is not finite is passed on; weights: [B]."""
    trains = (weights > 0)[:, None, None, None, None].to(known.latents.device)
    pixels = None if known.pixels is None else known.pixels.where(trains, 1.0)
    return Known(known.released.where(trains, 1.0), known.latents.where(trains, 0.0), pixels)


def with_held(x: Tensor, known: Known) -> Tensor:
    """x [B, C, F, h, w] with the clean values at the places that are known to the end, exactly."""
    return known.latents.to(x).where(known.held, x)


def frame_times(t: Tensor, held: Tensor) -> Tensor:
    """Times [B] as those of frames, float32 [B, F]: 0 where a whole frame is held; held: bool, as `Known.held`."""
    return t[:, None].where(~held[:, 0].flatten(2).all(2), 0.0)


def read_known(noised: Noised, known: Known, readers: frozenset[Reader]) -> Noised:
    """A training example as a family's readers of `Known` want it."""
    if "input" in readers:
        noised = replace(noised, x=with_held(noised.x, known))
    if "times" in readers:
        noised = replace(noised, t=frame_times(noised.t, known.held))
    if "loss" in readers:
        noised = replace(noised, counted=(~known.held).to(noised.target))
    if "loss_at_ends" in readers:
        noised = replace(noised, counted=(~_held_ends(known.held)).to(noised.target))
    return noised


def _held_ends(held: Tensor) -> Tensor:
    """Of `held` [B, 1, F, ...], the first and the last frame, in samples where no frame between them is held."""
    ends = held.clone()
    ends[:, :, 1:-1] = False
    alone = ~held[:, :, 1:-1].flatten(1).any(1)
    return ends & alone.view(-1, *[1] * (held.ndim - 1))
