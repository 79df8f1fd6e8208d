"""The config section of the optimizer, and of groups of parameters with a learning rate of their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from longtake.config.section import Section

OTHERS = "others"  # the group of what no pattern matches
Share = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0)]
Step = Annotated[int, Field(ge=0, le=10**12)]
Point = tuple[Step, Rate] | tuple[Step, Rate, Literal["linear", "cosine"]]


def ascending(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return the points of a schedule. Raises ValueError where their steps do not ascend."""
    if not points:
        raise ValueError("a schedule needs a point, such as (0, 1e-4)")
    for before, after in pairwise(points):
        if after[0] <= before[0]:
            raise ValueError(f"step {after[0]} comes after step {before[0]}; the steps of a schedule must ascend")
    return points


Schedule = Annotated[tuple[Point, ...], AfterValidator(ascending)]
_SCHEDULE = (
    "(step, rate) of points in ascending order; in between the rate goes along a straight line, or, after a point "
    '(step, rate, "cosine"), half a cosine; before the first and after the last it is constant'
)


class GroupConfig(Section):
    """Parameters with a learning rate and a decay of their own."""

    match: tuple[str, ...] = Field(min_length=1, description='patterns of their names, such as "*.bias"')
    name: str | None = Field(None, description="its name in metrics; default: its number")
    lr: float | None = Field(None, gt=0, description="peak of the run's schedule for them; default: that of all others")
    schedule: Schedule | None = Field(None, description=f"in place of the run's: {_SCHEDULE}")
    weight_decay: float | None = Field(None, ge=0, description="default: that of all others")

    @model_validator(mode="after")
    def _one_rate(self) -> GroupConfig:
        if self.lr is not None and self.schedule is not None:
            raise ValueError(f"lr = {self.lr:g}: schedule says the rates already; keep one of the two")
        return self


class ClipConfig(Section):
    """A limit on the gradient's norm that begins above `grad_clip`, and later answers norms far above it by more."""

    start: float = Field(5.0, ge=1, description="the limit begins at grad_clip times this")
    steps: int = Field(1000, ge=0, le=10**12, description="and falls to grad_clip over so many steps")
    abnormal: float = Field(
        5.0, ge=1, description="after them a norm of more than this many limits divides the limit by that many"
    )
    most: float = Field(10.0, ge=1, description="but by no more than this")


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, ICLR 2019)."""

    lr: float | None = Field(None, gt=0, description="default: the run's `lr`")
    schedule: Schedule | None = Field(
        None, description=f"in place of lr, warmup_steps and what lowers lr at the end: {_SCHEDULE}"
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="decay of the first and second moments")
    eps: float | None = Field(None, gt=0, description="default: the run's `eps`")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    no_decay: tuple[str, ...] = Field((), description="parts of names; parameters that have one do not decay")
    groups: tuple[GroupConfig, ...] = Field(
        (),
        description="parameters with a rate or a decay of their own, as dict(match=[...], lr=..., schedule=[...], "
        "weight_decay=..., name=...); the first that matches a name takes it",
    )
    clip: ClipConfig | None = Field(None, description="how the limit of grad_clip changes; None: not at all")
    states: Literal["fp32", "8bit"] = Field("fp32", description="how both moments are kept; `8bit`: 2 bytes a weight")
    offload: bool = Field(False, description="moments live in the host's memory and pass through the device each step")

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the groups in metrics; the first is that of the parameters in none."""
        return OTHERS, *(group.name or f"group {number}" for number, group in enumerate(self.groups, 1))

    @model_validator(mode="after")
    def _names_differ(self) -> OptimizerConfig:
        names = self.group_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"groups: two are called {twice[0]!r}; give each a name of its own")
        return self
