"""The config section of the videos that a run makes while it trains."""

from __future__ import annotations

from pydantic import Field, model_validator

from longtake.config import Section
from longtake.system.config import SamplingDefaults


class ValidationConfig(Section):
    """Which videos are made at every validation: always the same prompts, start images and seeds."""

    prompts: str | tuple[str, ...] = Field(
        description="a list of prompts, or a .txt or .csv file of prompts, as in generate.md"
    )
    references: tuple[str, ...] = Field(
        (),
        description='image or video for each prompt of the list, in its order; "" for none, `;` between several; of a '
        "model that takes no known frames, the file that it wants beside the prompt",
    )
    cond_type: str | None = Field(
        None, description="kind of known frames; None: the first frame, where there are references"
    )
    negative_prompt: str = Field("", description="what guidance moves away from")
    sampling_option: SamplingDefaults = Field(
        SamplingDefaults(), description="keys that differ from those of the run's sampling_option"
    )
    batch_size: int = Field(1, ge=1, description="videos sampled at once on each rank")
    ema: bool = Field(True, description="use the averaged weights (EMA) where the run has them")

    @model_validator(mode="after")
    def _each_prompt_has_a_reference(self) -> ValidationConfig:
        if not self.prompts:
            raise ValueError('prompts = (): there is nothing to make; write prompts = ["a red circle moves left"]')
        if isinstance(self.prompts, str) and self.references:
            raise ValueError(
                f"references: prompts = {self.prompts!r} is a file; name the images in its column ref, or list the "
                "prompts"
            )
        if self.references and len(self.references) != len(self.prompts):
            raise ValueError(
                f'references: {len(self.references)} for {len(self.prompts)} prompts; name one for each, "" where a '
                "prompt has none"
            )
        return self
