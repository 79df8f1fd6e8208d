"""Known frames: which latent frames of a sample are given to the network, and as what; in training and in sampling.

The visual condition of a sample is [1 + C, F, h, w]: a mask, 1 where a latent frame is known, and the latents of the
known frames, 0 elsewhere. The kinds are those of Open-Sora 2.0:

    t2v                           nothing is known
    i2v_head, i2v_tail, i2v_loop  the first frame, the last, both
    v2v_head, v2v_tail            the first or last 8 latent frames (of a causal autoencoder 9: 8 and a first frame)
    v2v_head_easy, v2v_tail_easy  16 (or 17) latent frames

What is known is encoded apart from the rest of the clip, as it will be when a video is generated from it: an
autoencoder that mixes frames would otherwise tell of frames that are not known. An autoencoder that is not causal takes
the latents of a v2v kind out of the clip's own, as its blocks of frames are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import LatentShape
from longtake.diffusion.config import NOTHING_KNOWN, ConditionConfig

Kind = Literal["t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy", "v2v_tail_easy"]

# Kind -> latent frames known at the head and at the tail; of v2v without the first frame of a causal autoencoder.
_KNOWN = {
    NOTHING_KNOWN: (0, 0),
    "i2v_head": (1, 0),
    "i2v_tail": (0, 1),
    "i2v_loop": (1, 1),
    "v2v_head": (8, 0),
    "v2v_tail": (0, 8),
    "v2v_head_easy": (16, 0),
    "v2v_tail_easy": (0, 16),
}


@dataclass(frozen=True)
class Window:
    """Known frames that follow each other."""

    frames: range  # of the clip's latents
    pixels: range | None  # frames of the clip that they are encoded from; None: the clip's own latents are taken

    @property
    def is_head(self) -> bool:
        """Whether it begins with the clip; otherwise it ends with it."""
        return self.frames.start == 0

    def num_pixel_frames(self, latent: LatentShape) -> int:
        """How many frames a file must give for it, where there is no clip to take them from."""
        return len(self.frames) * latent.temporal if self.pixels is None else len(self.pixels)


# encode(rows, window) -> latents [len(rows), C, len(window.frames), h, w]: what the autoencoder makes of the window's
# pixels, and of nothing else, of these samples of the batch. Only called for windows with pixels.
Encode = Callable[[Sequence[int], Window], Tensor]


def known_windows(kind: str, latent: LatentShape, num_frames: int) -> tuple[Window, ...]:
    """What a kind makes known of a clip of `num_frames` frames; empty where the clip is too short for the kind.

    A clip must have latent frames that are not known; i2v_loop alone may know all there are.
    """
    head, tail = _KNOWN[kind]
    length = latent(num_frames, 1, 1)[1]
    window = max(head, tail)
    if window > 1 and latent.causal:
        window += 1
    if length < 2 or (window > 1 and length <= window):
        return ()
    apart = window == 1 or latent.causal
    pixels = (window - 1) * latent.temporal + 1
    found = []
    if head:
        found.append(Window(range(window), range(pixels) if apart else None))
    if tail:
        span = range(num_frames - pixels, num_frames) if apart else None
        found.append(Window(range(length - window, length), span))
    return tuple(found)


def needs_pixels(kind: str, latent: LatentShape) -> bool:
    """Whether the latents of a kind are encoded from pixels; the other kinds need the clip's latents only."""
    head, tail = _KNOWN[kind]
    return head + tail > 0 and (latent.causal or max(head, tail) == 1)


def draw_kinds(uniforms: np.ndarray, config: ConditionConfig, latent: LatentShape, num_frames: int) -> list[str]:
    """The kind of each sample, drawn by weight from those that clips of `num_frames` frames are long enough for.

    uniforms: [B] in [0, 1). A still, and a clip too short for every kind of the config, gets t2v. The config is only
    read: a short clip changes nothing for the next one.
    """
    kinds = [
        kind
        for kind, weight in config.weights.items()
        if weight > 0 and (kind == NOTHING_KNOWN or known_windows(kind, latent, num_frames))
    ]
    if not kinds or latent(num_frames, 1, 1)[1] < 2:
        return [NOTHING_KNOWN] * len(uniforms)
    ends = np.cumsum([config.weights[kind] for kind in kinds])
    places = np.searchsorted(ends, uniforms.astype(np.float64) * ends[-1], side="right")
    return [kinds[place] for place in np.minimum(places, len(kinds) - 1).tolist()]


def visual_condition(
    latents: Tensor, kinds: Sequence[str], latent: LatentShape, num_frames: int, encode: Encode
) -> Tensor:
    """The visual condition of a batch: [B, 1 + C, F, h, w], mask first, of the latents' dtype and device.

    latents: [B, C, F, h, w], of clips of `num_frames` frames. kinds: one for each sample. `encode` is called once for
    each different window, with all samples that know it.
    """
    batch, channels, *size = latents.shape
    visual = latents.new_zeros(batch, 1 + channels, *size)
    rows_of: dict[Window, list[int]] = {}
    for row, kind in enumerate(kinds):
        for window in known_windows(kind, latent, num_frames):
            rows_of.setdefault(window, []).append(row)
    for window, rows in rows_of.items():
        frames = slice(window.frames.start, window.frames.stop)
        known = None if window.pixels is None else encode(rows, window)
        for i, row in enumerate(rows):
            place_known(visual[row], window, latents[row, :, frames] if known is None else known[i])
    return visual


def place_known(visual: Tensor, window: Window, latents: Tensor) -> None:
    """Writes a window of one sample into its visual condition [1 + C, F, h, w], in place.

    latents: [C, len(window.frames), h, w].
    """
    frames = slice(window.frames.start, window.frames.stop)
    visual[:1, frames] = 1
    visual[1:, frames] = latents.to(visual)


def with_known(latents: Tensor, visual: Tensor) -> Tensor:
    """Latents [B, C, F, h, w] whose known frames are those of the visual condition [B, 1 + C, F, h, w], exactly."""
    return torch.where(visual[:, :1] > 0, visual[:, 1:].to(latents), latents)


def keep_samples(visual: Tensor, weights: Tensor) -> Tensor:
    """The condition with zeros for samples of weight 0, so that not even a value that is not finite is passed on."""
    return torch.where((weights > 0)[:, None, None, None, None].to(visual.device), visual, 0.0)
