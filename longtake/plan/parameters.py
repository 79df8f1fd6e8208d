"""How many weights a rank holds, and how many it sees at once: exact, from the shapes of the real model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from longtake.models import MMDiTConfig, build_denoiser
from longtake.parallel.shard import UNIT_PARAMETERS


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together: one block, or all that is not in such a block."""

    kind: str  # "double", "single" or "rest"
    owned: int  # elements of the fullest rank's shards; 0 for a block that is gathered with the rest
    gathered: int  # elements of the whole unit; likewise


@dataclass(frozen=True)
class Weights:
    """The units of a model, and its size."""

    double: Unit
    single: Unit
    rest: Unit
    num_parameters: int  # of the whole model
    owned: int  # elements of the fullest rank over the whole model


@lru_cache(maxsize=64)
def count_weights(config: MMDiTConfig, shards: int) -> Weights:
    """Weights by unit when the first dim of each is cut into `shards` equal parts, rounded up, as FSDP2 does.

    The fullest rank is the first. Blocks of less than `UNIT_PARAMETERS` are gathered with the rest.
    """
    with torch.device("meta"):
        model = build_denoiser(config.model_copy(update={"depth": 1, "depth_single_blocks": 1}))
    whole, owned = dict.fromkeys(("double", "single", "rest"), 0), dict.fromkeys(("double", "single", "rest"), 0)
    for name, parameter in model.named_parameters():
        kind = name.split("_blocks.", 1)[0] if "_blocks." in name else "rest"
        whole[kind] += parameter.numel()
        owned[kind] += -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])
    counts = {"double": config.depth, "single": config.depth_single_blocks, "rest": 1}
    units, rest_owned, rest_whole = {}, owned["rest"], whole["rest"]
    for kind in ("double", "single"):
        if whole[kind] >= UNIT_PARAMETERS:
            units[kind] = Unit(kind, owned[kind], whole[kind])
        else:
            units[kind] = Unit(kind, 0, 0)
            rest_owned += counts[kind] * owned[kind]
            rest_whole += counts[kind] * whole[kind]
    return Weights(
        units["double"],
        units["single"],
        Unit("rest", rest_owned, rest_whole),
        sum(counts[kind] * whole[kind] for kind in counts),
        sum(counts[kind] * owned[kind] for kind in counts),
    )
