"""The first frame of a clip as Wan reads it: TI2V as clean latents at time 0, I2V in further input channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtake.contracts import Known, LatentShape, Places, Window
from longtake.diffusion.known import ONE_REF, KnownLaw, PixelShape, Refs
from longtake.diffusion.windows import NOTHING, EndWindows
from longtake.families.wan import KINDS
from longtake.models.wan_config import MASK_CHANNELS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GREY = 0.0  # pixels in [-1, 1] of the frames to be generated; black is -1


def law(model: Any, ae: Any) -> KnownLaw:
    """Return the law of conditioning frames of a model's samples."""
    return GreyVideo(model, ae) if model.visual_channels else FirstFrame(model, ae)


class FirstFrame(EndWindows):
    """The first latent frame, encoded by itself; `x_mask` names it to the denoiser."""

    kinds = KINDS

    def conditions(self, known: Known) -> dict[str, Tensor]:
        return {}


class GreyVideo(EndWindows):
    """The first frame, followed by grey ones and encoded as one video, and a mask (I2V).

    Every latent frame is generated and counts in the loss, the first one too.
    """

    kinds = KINDS

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Refs = ONE_REF) -> tuple[Window, ...]:
        """Return the whole clip, of which references give the first frame; empty for one latent frame."""
        num_latents = latent(num_frames, 1, 1)[1]
        if kind == NOTHING or num_latents < 2:
            return ()
        first = (range(1),)
        return (Window(range(num_latents), range(num_frames), "grey", True, fill=GREY, shown=first, by_mean=True),)

    def given(
        self, kind: str, latent: LatentShape, shape: PixelShape, mask: Tensor | None = None, refs: Refs = ONE_REF
    ) -> Places:
        import torch

        windows = self.windows(kind, latent, shape[0], refs)
        if not windows:
            return Places()
        to_make = (torch.arange(shape[0]) > 0)[None, :, None, None].expand(1, *shape)
        return Places(windows, released=torch.ones(1, len(windows[0].frames), 1, 1), mask=to_make)

    def conditions(self, known: Known) -> dict[str, Tensor]:
        """`visual` [B, 4 + C, F, h, w]: 1 in the mask channels of given pixel frames, then the latents; zeros where
        nothing is given."""
        import torch

        latents = known.latents
        batch, _, num_latents, *sides = latents.shape
        mask = latents.new_zeros(batch, MASK_CHANNELS, num_latents, 1, 1)
        if known.pixels is not None:
            is_given = ~known.pixels.flatten(3).any(3)[:, 0]  # [B, T]
            frames = _pixel_frames(self.ae.latent, num_latents, known.pixels.shape[2], latents.device)
            mask[..., 0, 0] = is_given[:, frames].to(mask)
        return {"visual": torch.cat([mask.expand(-1, -1, -1, *sides), latents], dim=1)}


def _pixel_frames(latent: LatentShape, num_latents: int, num_frames: int, device: torch.device) -> Tensor:
    """Return the pixel frame of each mask channel and latent frame: int64 [4, F] on the device.

    The first frame of a causal autoencoder has a latent frame to itself, and all four channels.
    """
    import torch

    start = torch.arange(num_latents, device=device) * latent.temporal - ((latent.temporal - 1) if latent.causal else 0)
    within = torch.arange(MASK_CHANNELS, device=device) * latent.temporal // MASK_CHANNELS
    return (start[None] + within[:, None]).clamp(0, num_frames - 1)
