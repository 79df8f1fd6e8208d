"""The `objective` section of a run: one kind for each objective."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from longtake.config.section import OpenSection
from longtake.hub import published_facts

Shift = float | Literal["resolution"] | None
FLOW_SOLVERS = ("euler", "ab2", "unipc", "unipc_diffusers", "dpmpp_2m")
NUM_TIMESTEPS = 1000  # of schedules by integers

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

    def within(self, low: float, high: float) -> Self | None:
        """Return the same with the part of its law of times between two shares of the way to noise; None where it
        has no such part."""
        return None


class FlowConfig(ObjectiveSection):
    """Rectified flow: what the network predicts, and the law its training times are drawn from.

    Time runs from 0 (clean) to 1 (noise).
    """

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.flow:RectifiedFlow"
    SOLVERS: ClassVar[tuple[str, ...]] = FLOW_SOLVERS

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


class Flow1000Config(ObjectiveSection):
    """Rectified flow on times 0 (clean) to 1000 (noise), whose law depends on the size and length of a clip."""

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.flow_1000:Flow1000"
    SOLVERS: ClassVar[tuple[str, ...]] = FLOW_SOLVERS

    type: Literal["flow_1000"] = Field("flow_1000", description="`flow_1000` is rectified flow on times 0 to 1000")
    sample_method: Literal["logit-normal", "uniform"] = Field(
        "logit-normal", description="law of training times before they are moved"
    )
    timestep_mean: float = Field(0.0, description="mean of the normal under the sigmoid")
    timestep_std: float = Field(1.0, gt=0.0, description="its standard deviation")
    use_timestep_transform: bool = Field(True, description="times are moved towards noise for large and long clips")
    transform_scale: float = Field(1.0, gt=0.0, description="by how much more than their size says")
    use_discrete_timesteps: bool = Field(False, description="times are whole numbers before they are moved")

    @model_validator(mode="after")
    def _whole_times_are_uniform(self) -> Flow1000Config:
        if self.use_discrete_timesteps and self.sample_method != "uniform":
            raise ValueError(
                f'objective.sample_method = "{self.sample_method}": with use_discrete_timesteps times are drawn '
                'uniformly; write "uniform", or leave use_discrete_timesteps out'
            )
        return self


class ShiftedFlowConfig(ObjectiveSection):
    """Rectified flow on times 0 (clean) to 1000 (noise), shifted by a number; the denoiser gives noise - clean."""

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.flow_shifted:ShiftedFlow"
    SOLVERS: ClassVar[tuple[str, ...]] = FLOW_SOLVERS

    type: Literal["shifted_flow"] = Field(
        "shifted_flow", description="`shifted_flow` is rectified flow on times 0 to 1000, shifted by a number"
    )
    shift: float = Field(5.0, gt=0.0, description="shift of training times, and of sampling; 1: none")
    law: Literal["uniform", "logit_normal", "mode"] = Field(
        "uniform",
        description="law of training times before the shift: `logit_normal` is the sigmoid of a normal, `mode` leans "
        "to the middle or the ends",
    )
    timestep_mean: float = Field(0.0, description="mean of the normal of `logit_normal`; positive leans to noise")
    timestep_std: float = Field(1.0, gt=0.0, description="its standard deviation")
    mode_scale: float = Field(1.29, ge=-1.0, le=1.75, description="strength of `mode`")
    time_range: tuple[float, float] = Field(
        (0.0, 1.0),
        description="training times, as shares of the way to noise, after the shift: the part of the law inside",
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap", "bell"] = Field(
        "none",
        description="weight of a loss by its time s in 0 to 1: `sigma_sqrt` 1 / s^2, `cosmap` 2 / (pi (1 - 2s + 2s^2)),"
        " `bell` a bell around 1/2 that is 0 at noise, of mean 1",
    )

    @field_validator("time_range")
    @classmethod
    def _range_ascends(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError(f"{list(value)}: expected two numbers from 0 to 1, the lower first, such as [0.875, 1]")
        return value

    def within(self, low: float, high: float) -> Self | None:
        own = max(low, self.time_range[0]), min(high, self.time_range[1])
        return self.model_copy(update={"time_range": own}) if own[0] < own[1] else None


class VPredictionConfig(ObjectiveSection):
    """v-prediction over 1,000 integer timesteps, the last of which is pure noise."""

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.v_prediction:VPrediction"
    SOLVERS: ClassVar[tuple[str, ...]] = ("ddim", "dpmpp_2m", "dpmpp_2m_sde")

    type: Literal["v_prediction"] = Field(
        "v_prediction", description="`v_prediction` has 1,000 timesteps that end in pure noise"
    )
    from_pretrained: str | None = Field(
        None,
        description="folder with the scheduler_config.json of published weights: keys of the schedule that are not "
        "written here are as it says",
    )
    beta_start: float = Field(0.00085, gt=0, lt=1, description="variance that the first timestep adds")
    beta_end: float = Field(0.012, gt=0, lt=1, description="variance that the last one adds, before the stretch")
    snr_shift: float = Field(1.0, gt=0, description="the signal-to-noise ratio of each timestep is divided by this")
    spacing: Literal["trailing", "linspace", "leading", "rescaled"] = Field(
        "trailing",
        description="which timesteps solvers take; `trailing` begins at the last; `rescaled`, as in SAT, too, and "
        "stretches the levels of those that are taken to pure noise anew",
    )
    solver_snr_shift: float | None = Field(
        None, gt=0, description="snr_shift of the levels that solvers take, with `rescaled` spacing; None: snr_shift"
    )
    num_timesteps: int = Field(
        NUM_TIMESTEPS, ge=1, le=NUM_TIMESTEPS, description="training times are drawn below this one"
    )
    uniform_sampling: bool = Field(
        False, description="each slot of a step draws from a part of the timesteps of its own, so that a step has all"
    )
    min_snr_gamma: float | None = Field(
        None,
        gt=0,
        description="losses are weighted by min(snr, this) / (snr + 1), usually 5, pure noise by 0; None: alike",
    )
    motion_loss: float = Field(
        0.0, ge=0, le=1, description="share of the loss that is about differences between neighbouring latent frames"
    )

    @model_validator(mode="after")
    def _shift_is_read(self) -> VPredictionConfig:
        if self.solver_snr_shift is not None and self.spacing != "rescaled":
            raise ValueError(
                f'solver_snr_shift = {self.solver_snr_shift:g}: is for spacing = "rescaled", and this is '
                f'"{self.spacing}"; leave it out'
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        own = {"beta_start", "beta_end", "snr_shift", "spacing"}
        if not isinstance(data, Mapping) or data.get("from_pretrained") is None or own <= data.keys():
            return data
        place = f"objective.from_pretrained = {data['from_pretrained']!r}"
        if (facts := published_facts(str(data["from_pretrained"]), "scheduler_config.json")) is None:
            raise ValueError(f"{place}: has no scheduler_config.json; name the `scheduler` folder of published weights")
        return {**published_schedule(facts, place), **data}


class NoisePredictionConfig(ObjectiveSection):
    """The noise of DDPM, over 1,000 integer timesteps; the defaults are PixArt's."""

    OBJECTIVE: ClassVar[str] = "longtake.diffusion.noise_prediction:NoisePrediction"
    SOLVERS: ClassVar[tuple[str, ...]] = ("ddim", "dpmpp_2m", "dpmpp_2m_sde")

    type: Literal["noise_prediction"] = Field(
        "noise_prediction", description="`noise_prediction` has 1,000 timesteps, and asks for the noise"
    )
    beta_start: float = Field(1e-4, gt=0, lt=1, description="variance that the first timestep adds")
    beta_end: float = Field(0.02, gt=0, lt=1, description="variance that the last one adds; in between it is linear")
    spacing: Literal["trailing", "linspace", "leading"] = Field(
        "trailing", description="which timesteps solvers take; `trailing` begins at the last"
    )


def published_schedule(facts: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keys of a v-prediction schedule that a `scheduler_config.json` says. Raises `ValueError` for another
    kind."""
    wanted = {
        "num_train_timesteps": NUM_TIMESTEPS,
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
    }
    for key, value in wanted.items():
        if facts.get(key) != value:
            raise ValueError(f"{place}: {key} is {facts.get(key)!r} there, and only {value!r} is trained here")
    plain = facts.get("_class_name") in ("DDIMScheduler", "DDPMScheduler")  # which know no shift
    sampled = {"set_alpha_to_one": True, "steps_offset": 0, "trained_betas": None}
    sampled |= {"clip_sample": False, "thresholding": False} if plain else {}  # CogVideoX's own schedulers ignore them
    for key, value in sampled.items():
        if facts.get(key, value) != value:
            raise ValueError(f"{place}: {key} is {facts[key]!r} there, and only {value!r} is sampled with here")
    return {
        "beta_start": facts.get("beta_start", 0.00085),
        "beta_end": facts.get("beta_end", 0.012),
        "snr_shift": 1.0 if plain else facts.get("snr_shift_scale", 1.0),
        "spacing": facts.get("timestep_spacing", "leading"),
    }
