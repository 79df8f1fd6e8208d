"""The sections of a run's configuration that this package builds from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from longtake.config import Section

Shift = float | Literal["resolution"] | None
NOTHING_KNOWN = "t2v"  # the kind of condition of a sample without known frames


class FlowConfig(Section):
    """Rectified flow: what the network predicts, and the law its training times are drawn from.

    Time runs from 0 (clean) to 1 (noise).
    """

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


class DropoutConfig(Section):
    """Share of the samples whose text is replaced by the empty prompt's, for each text encoder on its own."""

    t5: float = Field(0.0, ge=0.0, le=1.0, description="share of samples without their token sequence")
    clip: float = Field(0.0, ge=0.0, le=1.0, description="share of samples without their pooled vector")

    @property
    def ratios(self) -> tuple[float, float]:
        """(token sequence, pooled vector), in the order of the uniforms that `drop_text` takes."""
        return self.t5, self.clip


class ConditionConfig(Section):
    """How often each kind of known frames is trained on: weights, on any scale.

    A clip that is too short for a kind draws among the others; a still knows nothing.
    """

    t2v: float = Field(0.0, ge=0.0, description="nothing is known")
    i2v_head: float = Field(0.0, ge=0.0, description="the first frame is known")
    i2v_tail: float = Field(0.0, ge=0.0, description="the last frame is known")
    i2v_loop: float = Field(0.0, ge=0.0, description="the first and the last frame are known")
    v2v_head: float = Field(0.0, ge=0.0, description="the first 33 frames are known (32 where `ae` is not causal)")
    v2v_tail: float = Field(0.0, ge=0.0, description="the last 33 (32) frames are known")
    v2v_head_easy: float = Field(0.0, ge=0.0, description="the first 65 (64) frames are known")
    v2v_tail_easy: float = Field(0.0, ge=0.0, description="the last 65 (64) frames are known")

    @model_validator(mode="after")
    def _something_is_trained(self) -> ConditionConfig:
        if not any(self.weights.values()):
            raise ValueError(f"every weight is 0; give one kind a weight, such as {NOTHING_KNOWN} = 1")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Kind -> weight."""
        return {kind: getattr(self, kind) for kind in type(self).model_fields}
