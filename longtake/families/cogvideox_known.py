"""What CogVideoX sees of given frames, and CogVideoX-Fun of a masked video."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from longtake.contracts import Draw, Known, LatentShape
from longtake.diffusion.config import END_KINDS
from longtake.diffusion.known import (
    KNOWN_NOISE,
    NOTHING_KNOWN,
    ONE_REF,
    KnownLaw,
    PixelShape,
    Places,
    Refs,
    Window,
    kinds_by_weight,
)
from longtake.diffusion.windows import NOTHING, EndWindows
from longtake.families.cogvideox import INPAINT, MASK_KINDS
from longtake.families.cogvideox_masks import MASKS
from longtake.random import OwnNumbers, Purpose

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = 0.9  # share of the samples without any given pixel that see zeros, as text-to-video does
LOG_LEVEL = (-3.0, 0.5)  # mean and deviation of the logarithm of the noise level on given pixels
GENERATION_LEVEL = 0.0563
_OF_STILLS = {"i2v_head": (1, 0), "i2v_tail": (0, 1), "i2v_loop": (1, 1)}  # whether frames are given at head and tail
_CARRIED = 4  # frames that a kind of several takes where a video has them


def law(model: Any, ae: Any) -> KnownLaw:
    """What may be known of a model's samples."""
    return MaskedVideo(model, ae) if model.visual == "inpaint" else GivenFrames(model, ae)


class GivenFrames(EndWindows):
    """Frames at the ends of a clip, each window encoded by itself, as latents without a mask (I2V)."""

    def conditions(self, known: Known) -> dict[str, Tensor]:
        """`visual` [B, C, F, h, w]."""
        return {"visual": known.latents * getattr(self.ae, "known_scale", 1.0)}


class MaskedVideo(EndWindows):
    """The whole clip, black where its mask says that pixels are to be made, and what is left of that mask at the size
    of the latents (Fun-InP).

    A draw's numbers: of the kind, of the mask under `inpaint`, whether a clip without any given pixel is hidden, and
    two that all others of the mask follow from.
    """

    kinds = MappingProxyType({**END_KINDS, **MASK_KINDS})
    needs_mask = frozenset(MASK_KINDS) - {"inpaint_head", "inpaint_ends"}

    @property
    def draws(self) -> Mapping[str, Draw]:
        found = {"mask": Draw(Purpose.MASK, "uniform", (5,), of_view=True, is_choice=True)}
        if self.model.add_noise_in_inpaint_model:
            found[KNOWN_NOISE] = Draw(Purpose.KNOWN_NOISE, "normal", "pixels", of_view=True)
        return found

    def drawn(
        self, choices: Mapping[str, np.ndarray], weights: Mapping[str, float], latent: LatentShape, shape: PixelShape
    ) -> list[Places]:
        """Kinds drawn by weight from those that such clips may have; under `inpaint` masks in the published shares."""
        possible = [kind for kind in self.kinds if weights.get(kind, 0) > 0 and self._fits(kind, latent, shape[0])]
        of_kind = {kind: weights[kind] for kind in possible} or {NOTHING: 1.0}
        of_mask = {kind: share for kind in MASKS if (share := _share(kind, shape[0]))}
        uniforms = choices["mask"]
        kinds, masks = kinds_by_weight(uniforms[:, 0], of_kind), kinds_by_weight(uniforms[:, 1], of_mask)
        found = []
        for kind, mask, (hidden, *key) in zip(kinds, masks, uniforms[:, 2:].tolist(), strict=True):
            kind = mask if kind == INPAINT else kind
            if kind == NOTHING or (kind == "inpaint_all" and hidden < HIDDEN):
                found.append(NOTHING_KNOWN)
                continue
            numbers = OwnNumbers(*(int(u * 2**24) for u in key))
            if kind in MASKS:
                of_sample = _tensor(MASKS[kind][0](numbers, shape))
            else:
                of_sample = _around(self.windows(kind, latent, shape[0])[0], shape)
            noisy = self.model.add_noise_in_inpaint_model
            level = math.exp(LOG_LEVEL[0] + LOG_LEVEL[1] * numbers.normal()) if noisy else 0.0
            found.append(replace(self.masked(of_sample, latent), noise_level=level))
        return found

    def _fits(self, kind: str, latent: LatentShape, num_frames: int) -> bool:
        if kind in (NOTHING, INPAINT):
            return True
        return (kind not in MASKS or _share(kind, num_frames) > 0) and bool(self.windows(kind, latent, num_frames))

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
        """Return the whole clip; it shows frames at its ends, as many as there are references where these are single
        frames, or what a mask leaves."""
        if kind == NOTHING:
            return ()
        shown = None if kind in self.needs_mask else self._shown(kind, latent, num_frames, refs)
        if shown is not None and not 0 < sum(map(len, shown)) < num_frames:
            return ()
        frames = range(latent(num_frames, 1, 1)[1])
        return (Window(frames, range(num_frames), "masked", masked=True, shown=shown, by_mean=True),)

    def _shown(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs) -> tuple[range, ...]:
        if kind in MASKS:
            head = min(_CARRIED, (num_frames - 1) // 2 if kind == "inpaint_ends" else num_frames - 1)
            tail = head if kind == "inpaint_ends" else 0
        elif kind in _OF_STILLS:
            (has_head, tail), count = _OF_STILLS[kind], 1 if refs.carried else len(refs.frames)
            head, tail = (max(count - tail, 1), tail) if has_head else (0, count)
        else:
            ends = super().windows(kind, latent, num_frames)
            head, tail = (sum(len(one.pixels) for one in ends if one.is_head == at_head) for at_head in (True, False))
        ends = range(head), range(num_frames - tail, num_frames)
        return tuple(end for end in ends if len(end)) if head + tail <= num_frames else ()

    def given(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None = None, refs: Refs = ONE_REF
    ) -> Places:
        windows = self.windows(kind, latent, shape[0], refs)
        if windows and windows[0].shown is not None:
            mask = _around(windows[0], shape)
        if not windows or (mask is not None and mask.all()):
            return NOTHING_KNOWN
        assert mask is not None, f"{kind} knows what a mask leaves"
        level = GENERATION_LEVEL if self.model.add_noise_in_inpaint_model else 0.0
        return replace(self.masked(mask, latent), windows=windows, noise_level=level)

    def masked(self, mask: Tensor, latent: LatentShape) -> Places:
        """What a mask leaves of a clip. Frames given whole are held only where each is encoded by itself: elsewhere the
        black pixels around them change their latents too. mask: [1, T, H, W], True or 1 where pixels are to be made."""
        import torch

        num_frames, mask = mask.shape[1], mask.bool()
        released = mask.new_ones(1, latent(num_frames, 1, 1)[1], 1, 1, dtype=torch.float32)
        if latent.temporal == 1:
            released[:, ~mask.flatten(2).any(2)[0]] = 0
        return Places(self.windows(INPAINT, latent, num_frames), released, mask)

    def conditions(self, known: Known) -> dict[str, Tensor]:
        """`visual` [B, 1 + C, F, h, w]: 1 where pixels are given, on the scale of the latents, then the latents."""
        batch, channels, *size = known.latents.shape
        visual = known.latents.new_zeros(batch, 1 + channels, *size)
        visual[:, 1:] = known.latents
        if known.pixels is not None:
            given = resized(1 - known.pixels.float(), size, first_alone=self.ae.latent.causal)
            visual[:, :1] = given * self.ae.scale
        return {"visual": visual}


def resized(given: Tensor, size: Sequence[int], first_alone: bool) -> Tensor:
    """[B, 1, T, H, W] -> [B, 1, F, h, w], trilinear; the first frame becomes the first of the latents by itself where
    the autoencoder makes it so."""
    import torch
    from torch.nn.functional import interpolate

    if not first_alone or given.shape[2] == 1:
        return interpolate(given, tuple(size), mode="trilinear")
    frames, *sides = size
    parts = (given[:, :, :1], (1, *sides)), (given[:, :, 1:], (frames - 1, *sides))
    return torch.cat([interpolate(part, shape, mode="trilinear") for part, shape in parts], dim=2)


def _around(window: Window, shape: PixelShape) -> Tensor:
    """Return the mask of all frames but those that a window shows."""
    to_make = np.ones(shape, bool)
    for frames in window.shown or ():
        to_make[frames.start : frames.stop] = False
    return _tensor(to_make)


def _share(kind: str, num_frames: int) -> float:
    """Return the published share of a kind of masks, of clips or stills."""
    _, of_clips, of_stills = MASKS[kind]
    return of_clips if num_frames > 1 else of_stills


def _tensor(mask: np.ndarray) -> Tensor:
    """bool [T, H, W] -> bool [1, T, H, W]."""
    import torch

    return torch.from_numpy(mask)[None]
