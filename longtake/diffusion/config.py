"""The sections of a run's configuration that this package builds from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from longtake.config import Section

Shift = float | Literal["resolution"] | None


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
