"""How many weights a rank holds, and how many it sees at once: exact, from the shapes of the real model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from longtake.models import LoraConfig, MMDiTConfig, build_denoiser
from longtake.parallel.shard import UNIT_PARAMETERS
from longtake.system import SystemConfig
from longtake.system.lora import choose_trained

FP32 = 4
EIGHT_BIT_BYTES = 2 * (1 + FP32 / 256)  # of both moments of a weight: a code each, and a scale for 256 of them


@dataclass(frozen=True)
class Upkeep:
    """What of the weights trains, and how those that do are kept."""

    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] | None = None
    master_bytes: int = FP32  # of a weight that trains, and of its gradient
    moments_bytes: float = 2 * FP32  # of both moments of AdamW, a weight
    moments_offloaded: bool = False  # to the host's memory
    ema_offloaded: bool = False


PLAIN = Upkeep()


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together: one block, or all that is not in such a block."""

    kind: str  # "double", "single" or "rest"
    owned: int  # elements that train, of the fullest rank's shards
    frozen: int  # bytes of those that do not, likewise
    gathered: int  # elements of the whole unit in the compute dtype
    codes: int  # bytes of those that are kept, and gathered, in fewer bits
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
    widest_coded: int  # elements of the largest layer kept in fewer bits: it is decoded when it runs


@lru_cache(maxsize=64)
def count_weights(config: MMDiTConfig, shards: int, upkeep: Upkeep = PLAIN, compute_bytes: int = 2) -> Weights:
    """Weights by unit when the first dim of each is cut into `shards` equal parts, rounded up, as FSDP2 does.

    The fullest rank is the first. Blocks of less than `UNIT_PARAMETERS` are gathered with the rest.
    """
    parameters = _parameters(config, upkeep.lora, upkeep.freeze, upkeep.train_only, compute_bytes)
    names = [("double", f"double_blocks.{i}.") for i in range(config.depth)]
    names += [("single", f"single_blocks.{i}.") for i in range(config.depth_single_blocks)]
    by_unit: dict[str, list[_Parameter]] = {prefix: [] for _, prefix in names} | {"": []}
    for parameter in parameters:
        prefix = ".".join(parameter.name.split(".")[:2]) + "."
        by_unit[prefix if prefix in by_unit else ""].append(parameter)
    for _, prefix in names:
        if sum(p.elements for p in by_unit[prefix]) < UNIT_PARAMETERS:
            by_unit[""] += by_unit.pop(prefix)
    everything = _unit("rest", list(parameters), shards)
    return Weights(
        blocks=tuple(_unit(kind, by_unit.get(prefix, []), shards) for kind, prefix in names),
        rest=_unit("rest", by_unit[""], shards),
        num_parameters=_size(config),
        num_trained=everything.trained,
        owned=everything.owned,
        frozen=everything.frozen,
        widest_coded=max((p.decoded for p in parameters), default=0),
    )


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    coded: bool  # integers that stand for weights
    trained: bool
    decoded: int  # elements that the codes stand for

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _unit(kind: str, parameters: list[_Parameter], shards: int) -> Unit:
    def own(parameter: _Parameter) -> int:
        return -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])

    return Unit(
        kind,
        owned=sum(own(p) for p in parameters if p.trained),
        frozen=sum(own(p) * p.itemsize for p in parameters if not p.trained),
        gathered=sum(p.elements for p in parameters if not p.coded),
        codes=sum(p.elements * p.itemsize for p in parameters if p.coded),
        trained=sum(p.elements for p in parameters if p.trained),
    )


@lru_cache(maxsize=16)
def _size(config: MMDiTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_denoiser(config).parameters())


@lru_cache(maxsize=16)
def _parameters(
    config: MMDiTConfig,
    lora: LoraConfig | None,
    freeze: tuple[str, ...],
    train_only: tuple[str, ...] | None,
    compute_bytes: int,
) -> tuple[_Parameter, ...]:
    """The parameters of the model as it trains, adapters and all. Raises `UserError` as the run would."""
    with torch.device("meta"):
        model = build_denoiser(config)
        run = SystemConfig.model_construct(model=config, lora=lora, freeze=freeze, train_only=train_only)
        choose_trained(model, run, torch.bfloat16 if compute_bytes == 2 else torch.float32)
    found = []
    for name, p in model.named_parameters():
        coded = not p.is_floating_point()
        layer = model.get_submodule(name.rpartition(".")[0])
        decoded = layer.in_features * layer.out_features if coded else 0
        found.append(_Parameter(name, tuple(p.shape) or (1,), p.element_size(), coded, p.requires_grad, decoded))
    return tuple(found)
