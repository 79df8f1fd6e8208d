"""Known frames at the ends of a clip: the kinds of Open-Sora 2.0, given to the network as a mask and latents.

The condition `visual` of a sample is [1 + C, F, h, w]: a mask, 1 where a latent frame is known, and the latents of the
known frames, 0 elsewhere. What is known is encoded apart from the rest of the clip, as it will be when a video is
generated from it: an autoencoder that mixes frames would otherwise leak frames that are not known. An autoencoder
that is not causal takes the latents of a v2v kind out of the clip's own, as its blocks of frames are the same either
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from longtake.contracts import Known, LatentShape
from longtake.diffusion.config import END_KINDS
from longtake.diffusion.known import ONE_REF, ByKind, PixelShape, Places, Refs, Window, kinds_by_weight

if TYPE_CHECKING:  # the check of a config asks for windows alone
    import numpy as np
    from torch import Tensor

NOTHING = "t2v"

# Kind -> latent frames known at the head and at the tail; v2v of a causal autoencoder has its first frame beside them.
_KNOWN = {
    NOTHING: (0, 0),
    "i2v_head": (1, 0),
    "i2v_tail": (0, 1),
    "i2v_loop": (1, 1),
    "v2v_head": (8, 0),
    "v2v_tail": (0, 8),
    "v2v_head_easy": (16, 0),
    "v2v_tail_easy": (0, 16),
}


class EndWindows(ByKind):
    """The law of known frames at the ends of a clip (`KnownLaw`), alike for all `model` sections."""

    kinds = END_KINDS

    def drawn(
        self, choices: Mapping[str, np.ndarray], weights: Mapping[str, float], latent: LatentShape, shape: PixelShape
    ) -> list[Places]:
        """Kinds drawn by weight."""
        kinds = self.drawn_kinds(choices["mask"], weights, latent, shape[0])
        return [self.given(kind, latent, shape) for kind in kinds]

    def drawn_kinds(
        self, uniforms: np.ndarray, weights: Mapping[str, float], latent: LatentShape, num_frames: int
    ) -> list[str]:
        """Return the kind of each sample, drawn by weight from those that clips are long enough for.

        A still, and a clip too short for every kind, gets t2v. The weights are only read: a short clip changes nothing
        for the next one.
        """
        kinds = [
            kind
            for kind in self.kinds  # in this order, however the weights were written
            if weights.get(kind, 0) > 0 and (kind == NOTHING or self.windows(kind, latent, num_frames))
        ]
        if not kinds or latent(num_frames, 1, 1)[1] < 2:
            return [NOTHING] * len(uniforms)
        return kinds_by_weight(uniforms, {kind: weights[kind] for kind in kinds})

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
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
        pixels = (window - 1) * latent.temporal + 1 if apart else window * latent.temporal
        found = []
        if head:
            found.append(Window(range(window), range(pixels), f"head{window}" if apart else ""))
        if tail:
            places = range(length - window, length), range(num_frames - pixels, num_frames)
            found.append(Window(*places, f"tail{window}" if apart else ""))
        return tuple(found)

    def conditions(self, known: Known) -> dict[str, Tensor]:
        """`visual` [B, 1 + C, F, h, w]: the mask, then the latents."""
        batch, channels, *size = known.latents.shape
        visual = known.latents.new_empty(batch, 1 + channels, *size)
        visual[:, :1], visual[:, 1:] = 1 - known.released, known.latents
        return {"visual": visual}
