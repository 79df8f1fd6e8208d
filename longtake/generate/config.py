"""The config of a generation: what to sample, from which weights, and where to."""

from __future__ import annotations

from pydantic import Field

from longtake.system import SystemConfig


class GenerateConfig(SystemConfig):
    """Everything a generation is. The model's own part comes from the training run or exported file it is made from."""

    prompt: str | list[str] | None = Field(None, description="one prompt, or a list of them")
    prompts: str | None = Field(None, description="file of prompts: .txt, one a line, or .csv with a column `text`")
    negative_prompt: str = Field("", description="what guidance moves away from")
    num_samples: int | None = Field(None, ge=1, description="use only this many of the prompts")
    num_sample: int = Field(1, ge=1, description="videos for each prompt, at seeds seed, seed + 1, ...")
    batch_size: int = Field(1, ge=1, description="videos sampled at once on each rank")
    save_dir: str = Field("samples", description="folder that videos go into; nothing in it is overwritten")
    grid: bool = Field(False, description="also write a contact sheet of all videos, grid.png")
    ema: bool = Field(True, description="use the averaged weights where the checkpoint has them")
