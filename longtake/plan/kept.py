"""What recomputed blocks keep with a budget, as the formulas need it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from longtake.models import MMDiTConfig, build_denoiser
from longtake.parallel import Kept, choose_kept


@lru_cache(maxsize=256)
def kept_by_blocks(config: MMDiTConfig, budget: float, tensor: int) -> Mapping[str, Kept]:
    """What `double` and `single` blocks keep beside their inputs, by kind: see `choose_kept`."""
    with torch.device("meta"):
        model = build_denoiser(config.model_copy(update={"depth": 1, "depth_single_blocks": 1}))
    return MappingProxyType(
        {kind: choose_kept(model, f"{kind}_blocks", budget, tensor) for kind in ("double", "single")}
    )
