"""What CogVideoX sees of given frames."""

from __future__ import annotations

from torch import Tensor

from longtake.contracts import Known
from longtake.diffusion.windows import EndWindows


class GivenFrames(EndWindows):
    """Frames at the ends of a clip, each window encoded by itself: a mask and latents, or for I2V models no mask."""

    def conditions(self, known: Known) -> dict[str, Tensor]:
        visual = super().conditions(known)["visual"]
        return {"visual": visual[:, 1:] if self.model.visual == "image" else visual}
