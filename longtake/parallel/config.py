"""The `parallel` section of a run: the four degrees, checked against a number of ranks."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from longtake.config.section import Section
from longtake.contracts import UserError

AXES = ("replicate", "shard", "sequence", "tensor")
Degree = PositiveInt | Literal["auto"]


class ParallelConfig(Section):
    """Distribution of the model and the data over the ranks. One degree may be "auto": it follows from the rest."""

    replicate: Degree = Field(1, description="groups that each hold the whole model (HSDP when above 1)")
    shard: Degree = Field("auto", description="ranks of a group that read different data and share its weights")
    sequence: Degree = Field(1, description="ranks that share the tokens of one micro-batch; they share weights too")
    tensor: Degree = Field(1, description="ranks of one node that share each block's heads and MLP, and its tokens")
    bucket_sequence: dict[str, dict[PositiveInt, PositiveInt]] | Literal["auto"] | None = Field(
        None,
        description="sequence degree by entry, keyed like bucket_config; `auto`: the smallest that gives no rank more "
        "tokens than the largest entry does; None: parallel.sequence for all",
    )
    sequence_attention: Literal["auto", "ulysses", "ring"] = Field(
        "auto",
        description="how sequence peers attend: `ulysses` deals heads, `ring` passes keys; `auto`: Ulysses "
        "over as many peers as divide the heads, a ring of such groups beyond",
    )
    zero: Literal[2, 3] = Field(3, description="3 frees gathered weights after the forward, 2 keeps them for backward")
    forward_prefetch: NonNegativeInt = Field(0, description="blocks gathered ahead in forward; 0: PyTorch's own choice")
    backward_prefetch: NonNegativeInt = Field(0, description="the same in backward")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype in which gradients are summed over ranks")
    cpu_offload: bool = Field(False, description="masters, gradients and optimizer states live in the CPU's memory")

    @model_validator(mode="after")
    def _one_auto(self) -> ParallelConfig:
        found = [axis for axis in AXES if getattr(self, axis) == "auto"]
        if len(found) > 1:
            raise ValueError(
                f'parallel.{" and parallel.".join(found)} = "auto": only one degree can follow from the others; '
                'write all but one as numbers (shard is "auto" where it is not given)'
            )
        return self


def resolve_degrees(config: ParallelConfig, size: int) -> tuple[int, ...]:
    """(replicate, shard, sequence, tensor) as numbers. Raises `UserError` where they do not make `size` ranks."""
    degrees = {axis: getattr(config, axis) for axis in AXES}
    fixed = {axis: degree for axis, degree in degrees.items() if degree != "auto"}
    free = next((axis for axis, degree in degrees.items() if degree == "auto"), None)
    product = math.prod(fixed.values())
    if free is not None and size % product == 0:
        return tuple((degrees | {free: size // product}).values())
    if free is None and product == size:
        return tuple(degrees.values())
    above_one = {axis: degree for axis, degree in fixed.items() if degree > 1} or fixed
    keys = " x ".join(f"parallel.{axis}" for axis in above_one)
    numbers = " x ".join(str(degree) for degree in above_one.values())
    if free is None:
        others = product // fixed["shard"]
        remedy = f'shard = {size // others} or "auto"' if size % others == 0 else "degrees whose product is that"
        raise UserError(f"{keys} = {numbers}: makes {product} ranks but {size} are running; choose {remedy}")
    if size == 1:
        fix = f"write 1, or start {product} processes"
        raise UserError(f"{keys} = {numbers}: 1 process does not divide by {product}; {fix}")
    what = f"one of {divisors_in_words(size)}" if len(above_one) == 1 else "degrees of which it is a multiple"
    raise UserError(f"{keys} = {numbers}: {size} processes do not divide by {product}; choose {what}")


def divisors(n: int) -> list[int]:
    """Every number that divides n."""
    return [d for d in range(1, n + 1) if n % d == 0]


def divisors_in_words(n: int) -> str:
    """Return the same, for a sentence."""
    return ", ".join(map(str, divisors(n)))
