"""The first frame of a clip, given to TI2V of Wan 2.2 as clean latents at time 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtake.contracts import Known
from longtake.diffusion.known import KnownLaw
from longtake.diffusion.windows import EndWindows
from longtake.families.wan import KINDS

if TYPE_CHECKING:
    from torch import Tensor


def law(model: Any, ae: Any) -> KnownLaw:
    """What may be known of a model's samples."""
    return FirstFrame(model, ae)


class FirstFrame(EndWindows):
    """The first latent frame, encoded by itself; `x_mask` names it to the denoiser."""

    kinds = KINDS

    def conditions(self, known: Known) -> dict[str, Tensor]:
        return {}
