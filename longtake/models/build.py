"""From a `model` section to a denoiser."""

from __future__ import annotations

from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT


def build_denoiser(config: MMDiTConfig) -> MMDiT:
    """The denoiser of a config on the current default device (`with torch.device("meta")` allocates nothing).

    Its parameters are not a run's values yet: fill them with `initialise` or from a file.
    """
    return MMDiT(config)
