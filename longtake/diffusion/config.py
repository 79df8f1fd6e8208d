"""The `objective` section of a run: one kind for each objective."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from longtake.config import OpenSection

Shift = float | Literal["resolution"] | None

# Kinds of known frames at the ends of a clip (`windows.EndWindows`); the first makes nothing known.
END_KINDS = MappingProxyType(
    {
        "t2v": "nothing is known",
        "i2v_head": "the first frame is known",
        "i2v_tail": "the last frame is known",
        "i2v_loop": "the first and the last frame are known",
        "v2v_head": "the first 33 frames are known (32 where `ae` is not causal)",
        "v2v_tail": "the last 33 (32) frames are known",
        "v2v_head_easy": "the first 65 (64) frames are known",
        "v2v_tail_easy": "the last 65 (64) frames are known",
    }
)


class ObjectiveSection(OpenSection):
    """What every objective's section has: its class, and the solvers that walk its time."""

    OBJECTIVE: ClassVar[str]  # "module:class", called with (section, patch, quirks)
    SOLVERS: ClassVar[tuple[str, ...]]  # names for `sampling_option.solver`, the usual one first

    type: str = Field(description="the objective")


class FlowConfig(ObjectiveSection):
    """Rectified flow: what the network predicts, and the law its training times are drawn from.

    Time runs from 0 (clean) to 1 (noise).
    """

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.flow:RectifiedFlow"
    SOLVERS: ClassVar[tuple[str, ...]] = ("euler", "ab2")

    type: Literal["flow"] = Field("flow", description="the objective; `flow` is rectified flow on times 0 to 1")
    predict: Literal["velocity", "clean", "noise"] = Field("velocity", description="what the network predicts")
    sigma_min: float = Field(1e-5, ge=0.0, lt=1.0, description="standard deviation of the noise that is left at t = 0")
    shift: Shift = Field(
        "resolution", description="shift of training times: by resolution and length, a number, or None"
    )
    timestep_mean: float = Field(
        0.0, description="mean of the normal under the sigmoid; negative leans to clean samples"
    )
    timestep_std: float = Field(1.0, gt=0.0, description="its standard deviation")
    min_t: float = Field(
        0.05, gt=0.0, le=1.0, description="floor of the divisor in the weight of clean and noise prediction"
    )

    @field_validator("shift")
    @classmethod
    def _shift_is_positive(cls, shift: Shift) -> Shift:
        if isinstance(shift, float) and shift <= 0:
            raise ValueError("must be a number above 0, 'resolution' or None")
        return shift
