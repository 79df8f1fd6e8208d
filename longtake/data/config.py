"""The `dataset` section of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from longtake.config import Section


class DatasetConfig(Section):
    """What is trained on and how clips become samples."""

    data_path: str | None = Field(
        None, description="clip table: .csv, .parquet or .arrow, as made by `longtake data probe`; or `mix`"
    )
    mix: list[tuple[str, float]] | None = Field(
        None,
        min_length=1,
        description="several tables, each with the expected copies of its clips in a pass: [(path, weight), ...]",
    )
    captions: dict[str, float] | None = Field(
        None, min_length=1, description="caption columns and their probabilities (any scale); None: column text"
    )
    balance: bool = Field(True, description="fill the slots of a step with equal predicted time; False: at random")
    cost: tuple[float, float, float] | None = Field(
        None,
        description="measured time of a sample of L tokens, a + b L + c L^2, any unit: (a, b, c); None: model FLOPs",
    )
    root: str | None = Field(None, description="folder that relative paths start from; None: the table's own folder")
    transform_name: Literal["resize_crop"] = Field("resize_crop", description="how frames reach the bucket's size")
    fps_max: float | None = Field(24, gt=0, description="faster clips are read with a stride; None: no ceiling")
    vmaf: bool = Field(True, description="put the motion score (column score_vmafmotion) into the caption")
    cache_mb: float = Field(0, ge=0, description="decoded clips kept by each worker, MB; 0: none")
    timeout_seconds: float = Field(60, ge=0, description="longest time for one clip before it counts as bad; 0: none")
    views: int = Field(0, ge=0, description="number of different windows of a clip over all passes; 0: one a pass")

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        if (self.data_path is None) == (self.mix is None):
            found = "neither is given" if self.mix is None else "both are given"
            raise ValueError(f"data_path, mix: {found}; give one table as data_path, or several with weights as mix")
        return self

    @model_validator(mode="after")
    def _probabilities_are_some(self) -> DatasetConfig:
        for column, probability in (self.captions or {}).items():
            if probability < 0:
                raise ValueError(f"captions.{column} = {probability}: a probability of at least 0 is expected")
        if self.captions is not None and not any(self.captions.values()):
            raise ValueError(f"captions = {self.captions}: at least one probability must be above 0")
        for path, weight in self.mix or ():
            if weight < 0:
                raise ValueError(f"mix: the weight of {path} is {weight}; a number of at least 0 is expected")
        if self.mix is not None and not any(weight for _, weight in self.mix):
            raise ValueError("mix: every weight is 0; give at least one table a weight above 0")
        if self.cost is not None and (min(self.cost) < 0 or not any(self.cost)):
            raise ValueError(f"cost = {self.cost}: numbers of at least 0 are expected, and one above 0")
        return self
