"""Number of weights that a rank holds, and that it gathers at once: exact, from the shapes of the real model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from longtake.models.build import block_counts, build_denoiser
from longtake.parallel.shard import UNIT_PARAMETERS
from longtake.plan.layout import PLAIN, Layout, Upkeep
from longtake.system.config import SystemConfig
from longtake.system.lora import choose_trained


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together: one block, or all that is not in such a block."""

    owned: int  # elements that train, of the fullest rank's shards
    frozen: int  # bytes of those that do not, likewise
    gathered: int  # elements of the whole unit that are gathered in the compute dtype
    codes: int  # bytes of those that are stored, and gathered, in fewer bits
    trained: int  # elements of the whole unit that train


@dataclass(frozen=True)
class Weights:
    """The units of a model, and its size. Blocks that are gathered with the rest have empty units."""

    blocks: tuple[Unit, ...]  # in the order of the forward
    rest: Unit
    num_parameters: int  # of the whole model, without adapters
    num_trained: int
    owned: int  # elements that train, of the fullest rank over the whole model
    frozen: int  # bytes of those that do not, likewise

    def most_gathered(self, shards: int, zero: int) -> int:
        """Elements that a forward has gathered at its worst moment: all with `zero` 2, else of one block, with several
        shards of the next one too, and what is in no block."""
        blocks = [unit.gathered for unit in self.blocks]
        return self.rest.gathered + (sum(blocks) if zero == 2 else min(2, shards) * max(blocks, default=0))

    def gathers(self, zero: int) -> list[tuple[Unit, int]]:
        """Each unit with the number of times that a micro-batch gathers it. With `zero` 3 blocks are freed after their
        forward and gathered again; backward begins with the last one, and what is in no block is never freed."""
        large = [unit for unit in self.blocks if unit.gathered or unit.codes]
        again = 2 if zero == 3 else 1
        return [*((unit, again) for unit in large[:-1]), *((unit, 1) for unit in (*large[-1:], self.rest))]


def weights_of(config: Any, layout: Layout) -> Weights:
    """Weights as a layout holds them."""
    return count_weights(config, layout.weight_shards, layout.upkeep, layout.compute_bytes, layout.offload)


@lru_cache(maxsize=64)
def count_weights(
    config: Any, shards: int, upkeep: Upkeep = PLAIN, compute_bytes: int = 2, offload: bool = False
) -> Weights:
    """Weights by unit when the first dim of each is cut into `shards` equal parts, rounded up, as FSDP2 does.

    The fullest rank is the first. Blocks of less than `UNIT_PARAMETERS` are gathered with the rest. Frozen weights of
    which a rank holds all are not gathered, unless they are offloaded (`parallel.shard.stay_whole`).
    """
    model, resident = meta_model(config, upkeep, compute_bytes), shards == 1 and not offload
    own, rest = [], dict(model.named_parameters())
    for name in block_names(config):
        block = {f"{name}.{part}": p for part, p in model.get_submodule(name).named_parameters()}
        sharded = sum(p.numel() for p in block.values() if p.requires_grad or not resident)
        alone = sharded >= UNIT_PARAMETERS
        own.append(_unit(block.values() if alone else (), shards, resident))
        rest = {name: p for name, p in rest.items() if not alone or name not in block}
    everything = _unit(model.parameters(), shards, resident)
    return Weights(
        blocks=tuple(own),
        rest=_unit(rest.values(), shards, resident),
        num_parameters=_size(config),
        num_trained=everything.trained,
        owned=everything.owned,
        frozen=everything.frozen,
    )


def block_names(config: Any) -> list[str]:
    """Return the names of a denoiser's repeated blocks, in the order of the forward."""
    return [f"{blocks}.{i}" for blocks, count in block_counts(config).items() for i in range(count)]


def _unit(parameters: Iterable[Tensor], shards: int, resident: bool) -> Unit:
    """resident: frozen parameters are not gathered."""
    parameters = list(parameters)
    gathered = [p for p in parameters if p.requires_grad or not resident]

    def own(p: Tensor) -> int:
        shape = tuple(p.shape) or (1,)
        return -(-shape[0] // shards) * math.prod(shape[1:])

    return Unit(
        owned=sum(own(p) for p in parameters if p.requires_grad),
        frozen=sum(own(p) * p.element_size() for p in parameters if not p.requires_grad),
        gathered=sum(p.numel() for p in gathered if p.is_floating_point()),
        codes=sum(p.nbytes for p in gathered if not p.is_floating_point()),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
    )


@lru_cache(maxsize=16)
def _size(config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_denoiser(config).parameters())


def compute_dtype(compute_bytes: int) -> torch.dtype:
    """Return the compute dtype with so many bytes per number."""
    return torch.bfloat16 if compute_bytes == 2 else torch.float32


def meta_model(config: Any, upkeep: Upkeep, compute_bytes: int) -> nn.Module:
    """Return the model as it trains, adapters and all, on the meta device: to be looked at and not changed. Raises
    `UserError` as the run would."""
    return _meta_model(config, upkeep.lora, upkeep.freeze, upkeep.train_only, compute_bytes)


@lru_cache(maxsize=4)
def _meta_model(config: Any, lora: Any, freeze: Any, train_only: Any, compute_bytes: int) -> nn.Module:
    with torch.device("meta"):
        model = build_denoiser(config)
        if lora is not None or freeze or train_only is not None:
            run = SystemConfig.model_construct(model=config, lora=lora, freeze=freeze, train_only=train_only)
            choose_trained(model, run, compute_dtype(compute_bytes))
    return model
