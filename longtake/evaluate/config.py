"""The config section of what a run makes and measures of itself while it trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from longtake.config.section import Section
from longtake.system.config import SamplingDefaults

LOSSES_FILE = "validation.jsonl"  # in the folder of a run: the held-out losses of each validation


class ValidationConfig(Section):
    """What every validation makes and measures: always the same prompts, seeds, clips and noise."""

    prompts: str | tuple[str, ...] = Field(
        (), description="a list of prompts, or a .txt or .csv file of prompts, as in generate.md; (): no videos"
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
    ema: bool | Literal["both"] = Field(
        True,
        description='use the averaged weights (EMA) where the run has them; "both": the loss of the raw ones too',
    )
    offload: bool | Literal["auto"] = Field(
        "auto",
        description="whether the optimizer's moments and the average, and between its forwards the denoiser, wait in "
        'the host\'s memory while videos are made; "auto": on a GPU that would not have room for these otherwise',
    )
    data_path: str | None = Field(None, description="table or folder of held-out clips, whose loss is measured")
    heldout: float = Field(
        0.0, ge=0.0, le=0.5, description="share of the training clips that is held back in place of `data_path`"
    )
    clips: int = Field(64, ge=1, description="most held-out clips that are measured, always the same ones")
    levels: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.1, 0.3, 0.5, 0.7, 0.9),
        min_length=1,
        description="noise levels that their loss is measured at, as shares of the way from data to noise",
    )

    @property
    def holds_out(self) -> bool:
        """Whether a held-out loss is measured."""
        return self.data_path is not None or self.heldout > 0

    @model_validator(mode="after")
    def _each_prompt_has_a_reference(self) -> ValidationConfig:
        if not (self.prompts or self.holds_out):
            raise ValueError(
                'prompts = (): there is nothing to make; write prompts = ["a red circle moves left"], or heldout = 0.01'
            )
        if self.data_path is not None and self.heldout:
            raise ValueError(f"heldout = {self.heldout:g}: data_path names the held-out clips; keep one of the two")
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
