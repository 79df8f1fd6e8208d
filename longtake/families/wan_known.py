"""The first frame of a clip, given to TI2V of Wan 2.2 as clean latents at time 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longtake.contracts import Known
from longtake.diffusion.windows import EndWindows
from longtake.families.wan import KINDS

if TYPE_CHECKING:
    from torch import Tensor


class FirstFrame(EndWindows):
    """The first latent frame, encoded by itself; `x_mask` names it to the denoiser."""

    kinds = KINDS

    def conditions(self, known: Known) -> dict[str, Tensor]:
        return {}
